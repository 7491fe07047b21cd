"""Values of a few ids, spread over a vocabulary."""

from __future__ import annotations

import torch
from jaxtyping import Int, Shaped
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable


@lowerable
def spread(ids: Int[Tensor, "B M K"], values: Shaped[Tensor, "B M K"], size: int) -> Shaped[Tensor, "B M V"]:
    """``values`` summed by their ids, each below ``size``; 0 where an id is not named.

    On a TPU `jax_bridge.ops` compares ids instead: a scatter there runs entry by entry.
    """
    empty = torch.zeros(*ids.shape[:2], size, dtype=values.dtype, device=values.device)
    return empty.scatter_add(2, ids.long(), values)
