"""The products around attention over latents: a weight [heads * (nope + v), R] holds each head's W_k, W_v."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable
from torch_dflash.ops.spread import stacked_linear


class Widths(NamedTuple):
    """Widths of a latent, of a head's key without and with positions, and of a head's value."""

    rank: int
    nope: int
    rope: int
    value: int


@lowerable
def pays_to_expand(query: Float[Tensor, "B Q M D"], widths: Widths) -> bool:
    """Whether M rows take fewer products with expanded keys and values than with latents: some 170 rows on.

    A program's rows never do: it would expand every slot of a buffer, and reads latents up to the last used.
    """
    rank, nope, _, value = widths
    return query.shape[2] * (2 * rank - nope - value) > rank * (nope + value)


@lowerable
def halves(
    weight: Float[Tensor, "rows R"], widths: Widths
) -> tuple[Float[Tensor, "Q nope R"], Float[Tensor, "Q Dv R"]]:
    """W_k and W_v of each head.

    `jax_bridge.weights` keeps them as two arrays: of one, XLA reads half twice.
    """
    heads = weight.view(-1, widths.nope + widths.value, widths.rank)
    return heads[:, : widths.nope], heads[:, widths.nope :]


def absorbed(
    query: Float[Tensor, "B Q M nope_rope"], up: Float[Tensor, "Q nope R"]
) -> Float[Tensor, "B Q M D"]:
    """``[q W_k | q_rot]``: its products with ``[c | k_rot]`` are those of q with ``[W_k c | k_rot]``."""
    plain, turned = query.split([up.shape[1], query.shape[3] - up.shape[1]], dim=-1)
    return torch.cat([by_head(plain, up, True), turned], dim=-1)


def valued(sums: Float[Tensor, "B M Q R"], down: Float[Tensor, "Q Dv R"]) -> Float[Tensor, "B M Q Dv"]:
    """The heads' values of weighted sums of latents."""
    return by_head(sums.transpose(1, 2), down, False).transpose(1, 2)


@lowerable
def by_head(
    rows: Float[Tensor, "B Q M in"], stack: Float[Tensor, "Q _ _"], transposed: bool
) -> Float[Tensor, "B Q M out"]:
    """``rows`` times each head's own weight, [in, out] if it is ``transposed``, else [out, in]."""
    batch, heads, count, _ = rows.shape
    flat = rows.transpose(0, 1).reshape(heads, batch * count, -1)
    return stacked_linear(flat, stack, transposed).view(heads, batch, count, -1).transpose(0, 1)
