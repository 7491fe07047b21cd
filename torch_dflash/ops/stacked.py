"""Products of a stack of linear layers, such as experts are, and their sum."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable


@lowerable
def stacked_linear(
    rows: Float[Tensor, "experts R in"], stack: Float[Tensor, "experts K L"], transposed: bool
) -> Float[Tensor, "experts R out"]:
    """Each layer's ``rows`` times its weight, [out, in] or, ``transposed``, [in, out].

    `jax_bridge.weights.products` computes a row alone as it does beside others.
    """
    return torch.bmm(rows, stack if transposed else stack.transpose(1, 2))


@lowerable
def stacked_sum(stack: Float[Tensor, "experts R H"], dtype: torch.dtype) -> Float[Tensor, "R H"]:
    """The sum over the stack, rounded once to ``dtype``."""
    return stack.sum(dim=0).to(dtype)
