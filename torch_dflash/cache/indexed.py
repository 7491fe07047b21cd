"""Layers with an indexer, by whose keys the model chooses positions: they lie beside the layer's own rows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from torch_dflash.cache.latent import SharedLayer, SharedPages
from torch_dflash.cache.spec import ByPosition
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.paged_attention import Pages, append_pages
from torch_dflash.ops.windows import reach, write_rows
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class IndexRows(SharedLayer):
    """Dense keys of an indexer."""

    def slots(self, rows: int, view: Any) -> int:
        """The slots that `extended` hands out after ``rows`` more rows."""
        return reach(view.start, rows, self.key.shape[2])

    def extended(self, rows: Float[Tensor, "B one M D"], view: Any) -> tuple[Tensor, IndexRows]:
        """All keys [B, S, D], these rows' included, and the next layer; consumes self."""
        key = write_rows(self.key, rows, view.start, dim=2, count=view.count)
        return key[:, 0, : self.slots(rows.shape[2], view)].to(rows.dtype), IndexRows(key)


@register_state
@dataclass(frozen=True)
class IndexPages(SharedPages):
    """Pages of an indexer's keys, in a pool of their own; the table is that of the layer's pages."""

    def slots(self, rows: int, view: Any) -> int:
        """All positions of a row's pages."""
        return view.table.shape[1] * self.pool.shape[2]

    def extended(self, rows: Float[Tensor, "B one M D"], view: Any) -> tuple[Tensor, IndexPages]:
        """`IndexRows.extended`; slots without a page hold other rows', which the caller's mask hides."""
        pool = append_pages(rows, rows[..., :0], view.start, Pages(self.pool, view.table))
        held = pool[view.table.long()][:, :, 0].flatten(1, 2)
        return held[..., : rows.shape[3]].to(rows.dtype), IndexPages(pool)


@register_state
@dataclass(frozen=True)
class IndexedLayer(ByPosition):
    """A layer that attends to chosen positions alone, and its indexer's keys: `IndexRows` or `IndexPages`."""

    own: Any
    index: Any

    @property
    def expands(self) -> bool:
        return getattr(self.own, "expands", False)

    def update(self, key: Tensor, value: Tensor, view: Any) -> tuple[Tensor, Tensor, IndexedLayer]:
        key, value, own = self.own.update(key, value, view)
        return key, value, replace(self, own=own)

    def attend(self, inputs: AttentionInputs, view: Any) -> tuple[Tensor, IndexedLayer]:
        out, own = self.own.attend(inputs, view)
        return out, replace(self, own=own)

    def extended(self, rows: Tensor, view: Any) -> tuple[Tensor, IndexedLayer]:
        keys, index = self.index.extended(rows, view)
        return keys, replace(self, index=index)

    def reset(self, rows: Bool[Tensor, " B"]) -> IndexedLayer:
        return IndexedLayer(self.own.reset(rows), self.index.reset(rows))
