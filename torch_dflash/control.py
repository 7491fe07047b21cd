"""A branch on data that both runtimes understand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function


def branch(condition: Tensor, then: Callable, otherwise: Callable, *operands: Tensor) -> Any:
    """``then(*operands)`` if the scalar ``condition`` holds, else ``otherwise(*operands)``.

    Eagerly this reads one scalar. Under XLA `jax_bridge.ops` makes it a device-side conditional, of
    which only the chosen side runs; both sides must return tensors of the same shapes and dtypes.
    """
    if has_torch_function((condition, *operands)):
        return handle_torch_function(branch, (condition, *operands), condition, then, otherwise, *operands)
    return then(*operands) if bool(condition) else otherwise(*operands)
