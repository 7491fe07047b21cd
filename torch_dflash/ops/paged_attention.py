"""Attention over pages that all rows share: write new rows, then attend to all of a row."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from torch_dflash.ops.attention import KeyValue, grouped_attention, visible


def paged_attention(
    query: Float[Tensor, "B Q M D"],
    key: Float[Tensor, "B G M D"],
    value: Float[Tensor, "B G M Dv"],
    pool: Float[Tensor, "P G page KV"],
    table: Int[Tensor, "B T"],
    start: Int[Tensor, " B"],
    scale: float,
    window: int | None = None,
    sinks: Float[Tensor, " Q"] | None = None,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "B M Q Dv"], Float[Tensor, "P G page KV"]]:
    """Write M new rows into the pages at ``start``, then causal attention of these rows: (output, pool).

    The pool is consumed: eagerly it is written in place, under XLA donated. This is the plain form, which
    gathers every row's pages; `jax_bridge.kernels` has those that read pages where they lie.

    Args:
        table: page numbers; positions past T pages are written to page 0 and must not be read back.
        start: positions already in the pages; row i of M stands at ``start + i``.
        scale: factor on the scores.
        window: how many positions a row sees, itself included; None for all.
        sinks: one learned logit per query head that takes part in the softmax and carries no value.
        softcap: ``c`` in ``c * tanh(score / c)``.
    """
    tensors = (query, key, value, pool, table, start)
    if has_torch_function(tensors):
        more = {"window": window, "sinks": sinks, "softcap": softcap}
        return handle_torch_function(paged_attention, tensors, *tensors, scale, **more)
    k_dim, v_dim = key.shape[3], value.shape[3]
    page, columns = pool.shape[2], table.shape[1]
    at = start[:, None] + torch.arange(key.shape[2], device=start.device, dtype=start.dtype)
    column = at // page
    number = table.gather(1, column.clamp(max=columns - 1).long())
    number = torch.where(column < columns, number, 0)
    fresh = side_by_side(key, value, pool.shape[3]).to(pool.dtype)
    pool[number.long(), :, (at % page).long()] = fresh.transpose(1, 2)
    dense = pool[table.long()].transpose(1, 2).flatten(2, 3)
    slots = torch.arange(dense.shape[2], device=start.device, dtype=start.dtype)
    # Behind a row's end lie other rows' pages, and what is not finite there would pass a weight of zero.
    own = slots < start[:, None] + key.shape[2]
    dense = torch.where(own[:, None, :, None], dense, 0)
    seen = visible(at, slots[None], window, causal=True)
    part = KeyValue(dense[..., :k_dim], dense[..., k_dim : k_dim + v_dim], seen)
    return grouped_attention(query, [part], scale, sinks=sinks, softcap=softcap), pool


def side_by_side(key: Tensor, value: Tensor, width: int) -> Float[Tensor, "B G M KV"]:
    """K and V of the new rows as they lie in a page."""
    return F.pad(torch.cat([key, value], dim=-1), (0, width - key.shape[3] - value.shape[3]))


def pool_width(k_dim: int, v_dim: int) -> int:
    """Lanes of a position in a page: K and V, in whole registers."""
    return -(-(k_dim + v_dim) // LANES) * LANES


LANES = 128
"""K and V of a position lie side by side, padded to this many: the width of a TPU's vector registers."""
