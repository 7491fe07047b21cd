"""Dense buffers: keys and values of whole rows, two arrays for each layer."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.cache.spec import ByPosition, FreshRows, LayerSpec
from torch_dflash.cache.view import CacheView
from torch_dflash.ops.attention import AttentionInputs, KeyValue, dense_attention, grouped_attention
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.ops.windows import clear_rows, write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class StaticLayer(ByPosition):
    """Dense K/V of one layer. Row b holds positions ``0 .. length[b]-1``; later slots are stale.

    A rollback leaves ``length`` where it was: masks hide stale slots until they are overwritten.
    """

    key: Float[Tensor, "B G S D"]
    value: Float[Tensor, "B G S Dv"]

    @classmethod
    def allocate(cls, spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> StaticLayer:
        """Zeroed buffers of one layer."""
        shape = plan.batch_size, spec.heads, plan.slots
        # Zeros, not empty: a masked slot is multiplied by a zero weight, and 0 * NaN would be NaN.
        return cls(
            *(torch.zeros(*shape, dim, dtype=dtype, device=device) for dim in (spec.k_dim, spec.v_dim))
        )

    def write(
        self, key: Tensor, value: Tensor, start: Int[Tensor, " B"], count: Int[Tensor, " B"] | None = None
    ) -> StaticLayer:
        """Put [B, G, M, D] rows, or the first ``count`` [B] of them, at ``start`` [B]; consumes self."""
        return replace(
            self,
            key=write_rows(self.key, key, start, dim=2, count=count),
            value=write_rows(self.value, value, start, dim=2, count=count),
        )

    def attend(self, inputs: AttentionInputs, view: CacheView) -> tuple[Tensor, StaticLayer | FreshRows]:
        """Write the rows' K and V, attend causally to all positions so far; consumes self.

        Rows of a tree are not written: `FreshRows` keeps them until ``commit``.
        """
        if inputs.tree is not None:
            held = Past(self.key, self.value, positions_in(self.key, inputs.start))
            kind = self.key.dtype
            inputs = inputs._replace(key=inputs.key.to(kind), value=inputs.value.to(kind))
            out = block_attention(inputs, held, causal=True)
            own = FreshRows(self, inputs.key, inputs.value, inputs.start, None)
            return out.to(inputs.query.dtype), own
        layer = self.write(inputs.key, inputs.value, inputs.start, view.count)
        mask = view.mask(inputs, layer.key.shape[2])
        return dense_attention(inputs, layer.key, layer.value, mask), layer

    def positions(self, length: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
        """The position in each slot when ``length`` [B] are committed, -1 for none."""
        return positions_in(self.key, length)

    def append(self, key: Tensor, value: Tensor, start: Int[Tensor, " B"], table: Any) -> StaticLayer:
        """Write the rows of one path of a tree; consumes self."""
        return self.write(key, value, start)

    def reset(self, rows: Bool[Tensor, " B"]) -> StaticLayer:
        """Zero the rows marked: values of the former request may not be finite."""
        return type(self)(clear_rows(self.key, rows), clear_rows(self.value, rows))


def positions_in(buffer: Float[Tensor, "B G S D"], length: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
    """The position in each slot of a dense buffer when ``length`` [B] are committed, -1 for none."""
    slots = torch.arange(buffer.shape[2], device=length.device, dtype=length.dtype)
    return torch.where(slots < length[:, None], slots, -1)


def attend_densely(
    inputs: AttentionInputs, key: Tensor, value: Tensor, mask: Tensor | None
) -> Float[Tensor, "B M Q Dv"]:
    """Attention of the rows to dense keys and values, with the scale, sinks and soft cap of ``inputs``."""
    part = KeyValue(key, value, mask)
    return grouped_attention(inputs.query, [part], inputs.scale, inputs.sinks, inputs.softcap)
