"""Values that the host works out in the middle of a step."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable


@lowerable
def on_host(*given: Tensor, function: Callable[..., Any], shape: tuple[int, ...]) -> Tensor:
    """What ``function`` makes of ``given`` as numpy arrays: an int32 array of ``shape``.

    It has to be pure: a compiled program may call it again, or not at all where nothing reads its result.
    """
    found = function(*(tensor.numpy(force=True) for tensor in given))
    assert found.shape == shape, f"{function} made {found.shape}, not {shape}"
    return torch.from_numpy(found).to(given[0].device)
