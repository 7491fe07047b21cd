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
    return torch.cat([_by_head(plain, up, transposed=True), turned], dim=-1)


def valued(sums: Float[Tensor, "B M Q R"], down: Float[Tensor, "Q Dv R"]) -> Float[Tensor, "B M Q Dv"]:
    """The heads' values of weighted sums of latents."""
    return _by_head(sums.transpose(1, 2), down, transposed=False).transpose(1, 2)


def _by_head(rows: Tensor, stack: Tensor, transposed: bool) -> Tensor:
    """``rows`` [B, Q, M, in] times each head's own weight."""
    batch, heads, count, _ = rows.shape
    flat = rows.transpose(0, 1).reshape(heads, batch * count, -1)
    return stacked_linear(flat, stack, transposed).view(heads, batch, count, -1).transpose(0, 1)
