"""The paged cache: K and V of all rows in one pool of pages, found through each row's page table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.cache.spec import ByPosition, FreshRows
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.paged_attention import Pages, append_pages, paged_attention, pool_width
from torch_dflash.plan import DecodePlan
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class PagedLayer(ByPosition):
    """One layer's pool: position p of row b is ``pool[table[b, p // page], :, p % page]``: K, V, zeros.

    The table belongs to the state (`DecodeState.page_table`) and serves all layers. Unused rows, and
    positions without a page, write to page 0, which no row owns.
    """

    pool: Float[Tensor, "P G page_size KV"]

    @classmethod
    def allocate(cls, spec: Any, plan: DecodePlan, dtype: torch.dtype, device) -> PagedLayer:
        """Zeroed pages of one layer: finite, for a masked slot is multiplied by a zero weight."""
        shape = plan.pages, spec.heads, plan.page_size, pool_width(spec.k_dim, spec.v_dim)
        return cls(torch.zeros(shape, dtype=dtype, device=device))

    def attend(self, inputs: AttentionInputs, view: Any) -> tuple[Tensor, PagedLayer | FreshRows]:
        """Write the rows' K and V, attend causally to all positions so far; consumes self.

        Rows of a tree are not written: `FreshRows` keeps them until ``commit``.
        """
        out, pool = paged_attention(inputs, Pages(self.pool, view.table))
        layer = type(self)(pool)
        if inputs.tree is None:
            return out, layer
        return out, FreshRows(layer, inputs.key, inputs.value, inputs.start, view.table)

    def append(self, key: Tensor, value: Tensor, start: Int[Tensor, " B"], table: Any) -> PagedLayer:
        """Write the rows of one path of a tree; consumes self."""
        return PagedLayer(append_pages(key, value, start, Pages(self.pool, table)))

    def reset(self, rows: Bool[Tensor, " B"]) -> PagedLayer:
        """Nothing: pages that the host assigns again are written before they are read."""
        return self
