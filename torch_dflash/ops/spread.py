"""Sums over ids of a vocabulary and over stacks of experts, marks of ids, and the largest logits."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable


@lowerable
def spread(ids: Int[Tensor, "B M K"], values: Shaped[Tensor, "B M K"], size: int) -> Shaped[Tensor, "B M V"]:
    """``values`` summed by ids below ``size``; 0 for an id without a value.

    On a TPU `jax_bridge.ops` compares ids instead: a scatter there runs entry by entry.
    """
    empty = torch.zeros(*ids.shape[:2], size, dtype=values.dtype, device=values.device)
    return empty.scatter_add(2, ids.long(), values)


@lowerable
def marked(ids: Int[Tensor, "B M K"], size: int) -> Bool[Tensor, "B M V"]:
    """Whether an id below ``size`` is among those of a row, which differ.

    On a TPU `jax_bridge.ops` multiplies instead of a scatter.
    """
    empty = torch.zeros(*ids.shape[:2], size, dtype=torch.bool, device=ids.device)
    return empty.scatter(2, ids.long(), True)


@lowerable
def likeliest(
    logits: Float[Tensor, "B *N V"], scale: Float[Tensor, "B *ones"], most: int
) -> tuple[Float[Tensor, "B *N K"], Int[Tensor, "B *N K"], Float[Tensor, "B *N"]]:
    """The K = min(``most``, V) largest of ``logits`` in falling order, their places, and a log-sum of all.

    The log-sum is that of ``exp((logits - the largest) / scale)``, so a value's log-probability is
    ``(value - values[..., :1]) / scale - sum``.

    On a slice `jax_bridge.mesh` gathers each chip's best entries and its sum in one collective.
    """
    values, places = logits.topk(min(most, logits.shape[-1]), dim=-1)
    return values, places, torch.logsumexp((logits - values[..., :1]) / scale, dim=-1)


@lowerable
def stacked_linear(
    rows: Float[Tensor, "experts R in"],
    stack: Float[Tensor, "all K L"],
    transposed: bool,
    at: Int[Tensor, " experts"] | None = None,
) -> Float[Tensor, "experts R out"]:
    """Each layer's ``rows`` times its weight, [out, in] or, ``transposed``, [in, out].

    ``at``: the layers of the stack that are multiplied; None: all. `jax_bridge.weights.products` rounds a row
    alone as in a block.
    """
    stack = stack if at is None else stack.index_select(0, at)
    return torch.bmm(rows, stack if transposed else stack.transpose(1, 2))


@lowerable
def stacked_sum(stack: Float[Tensor, "experts R H"], dtype: torch.dtype) -> Float[Tensor, "R H"]:
    """The sum over the stack, rounded once to ``dtype``."""
    return stack.sum(dim=0).to(dtype)
