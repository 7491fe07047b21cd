"""The paged cache: K and V of all rows in one pool of pages, found through each row's page table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from torch_dflash.attention import KeyValue, Rows, grouped_attention, visible
from torch_dflash.state import DecodePlan, register_state

LANES = 128
"""K and V of a position lie side by side, padded to this many: the width of a TPU's vector registers."""


@register_state
@dataclass(frozen=True)
class PagedLayer:
    """One layer's pool: position p of row b is ``pool[table[b, p // page], :, p % page]``: K, V, zeros.

    The table is the same for all layers and belongs to the state (`DecodeState.pages`). Page 0 belongs to
    nobody: rows that are not in use, and positions without a page, write there.
    """

    pool: Float[Tensor, "P G page KV"]

    axes = ("P", "G", "S", "D")

    def update(self, key: Tensor, value: Tensor, view: Any) -> tuple[Tensor, Tensor, PagedLayer]:
        """What the attention module goes on with: its own rows, for ``attend`` does the rest."""
        return key, value, self

    def attend(self, rows: Rows, view: Any) -> tuple[Tensor, PagedLayer]:
        """Write the rows' K and V, attend causally to all positions so far; consumes self."""
        out, pool = paged_attention(
            rows.query,
            rows.key,
            rows.value,
            self.pool,
            view.table,
            view.start,
            rows.scale,
            window=rows.window,
            sinks=rows.sinks,
            softcap=rows.softcap,
        )
        return out, PagedLayer(pool)

    def commit(self, commit) -> PagedLayer:
        """A chain's accepted rows already stand where they belong."""
        return self


def allocate_pool(spec: Any, plan: DecodePlan, dtype: torch.dtype, device) -> PagedLayer:
    """Zeroed pages of one layer: finite, for a masked slot still meets a zero weight."""
    shape = (plan.pages, spec.heads, plan.page_size, pool_width(spec.k_dim, spec.v_dim))
    return PagedLayer(torch.zeros(shape, dtype=dtype, device=device))


def pool_width(k_dim: int, v_dim: int) -> int:
    """Lanes of a position in a page: K and V, in whole registers."""
    return -(-(k_dim + v_dim) // LANES) * LANES


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
