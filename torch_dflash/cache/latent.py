"""Layers of latent attention (DeepSeek's MLA): of a model that attends to latents, or expands them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.cache.dense import StaticLayer, attend_densely, positions_in
from torch_dflash.cache.paged import PagedLayer
from torch_dflash.cache.spec import ByPosition, FreshRows, LayerSpec
from torch_dflash.cache.view import CacheView
from torch_dflash.ops.attention import AttentionInputs, dense_attention
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.ops.paged_attention import Pages, append_pages, pool_width
from torch_dflash.ops.windows import clear_rows, reach, write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class SharedLayer(ByPosition):
    """Dense rows ``[c | k_rot]`` of one head. The values c are read where the keys lie."""

    key: Float[Tensor, "B one S D"]
    expands: ClassVar[bool] = True

    @classmethod
    def allocate(cls, spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> SharedLayer:
        """A zeroed buffer of one layer: finite, for a masked slot is multiplied by a zero weight."""
        shape = plan.batch_size, spec.heads, plan.slots, spec.k_dim
        return cls(torch.zeros(shape, dtype=dtype, device=device))

    def attend(self, inputs: AttentionInputs, view: CacheView) -> tuple[Tensor, SharedLayer | FreshRows]:
        """`StaticLayer.attend` of rows whose values are whole keys; what lies behind c is cut off.

        A key may be NaN there (`finite_values`): no other lane's sum has a part in it.
        """
        width, kind = inputs.value.shape[3], inputs.query.dtype
        inputs = inputs.joined()
        if inputs.tree is not None:
            rows = inputs.key.to(self.key.dtype)
            held = Past(self.key, self.key, positions_in(self.key, inputs.start))
            out = block_attention(inputs._replace(key=rows, value=rows), held, causal=True)
            own = FreshRows(self, rows[..., width:], rows[..., :width], inputs.start, None)
            return out[..., :width].to(kind), own
        layer = SharedLayer(write_rows(self.key, inputs.key, inputs.start, dim=2, count=view.count))
        mask = view.mask(inputs, layer.key.shape[2])
        if inputs.expand is not None:
            held = layer.key[:, :, : mask.shape[3]].to(kind)
            key, value = inputs.expand(held[..., :width], held[..., width:])
            return attend_densely(inputs, key, value, mask), layer
        return dense_attention(inputs, layer.key, layer.key, mask)[..., :width], layer

    def append(self, key: Tensor, value: Tensor, start: Int[Tensor, " B"], table: Any) -> SharedLayer:
        """Write the rows of one path of a tree; consumes self."""
        return SharedLayer(write_rows(self.key, torch.cat([value, key], dim=-1), start, dim=2))

    def reset(self, rows: Bool[Tensor, " B"]) -> SharedLayer:
        """Zero the rows marked: values of the former request may not be finite."""
        return type(self)(clear_rows(self.key, rows))


@register_state
@dataclass(frozen=True)
class SharedPages(PagedLayer):
    """Pages of rows ``[c | k_rot]`` of one head, and zeros."""

    @classmethod
    def allocate(cls, spec: Any, plan: DecodePlan, dtype: torch.dtype, device) -> SharedPages:
        """Zeroed pages of one layer."""
        shape = plan.pages, spec.heads, plan.page_size, pool_width(spec.k_dim, 0)
        return cls(torch.zeros(shape, dtype=dtype, device=device))

    def append(self, key: Tensor, value: Tensor, start: Int[Tensor, " B"], table: Any) -> SharedPages:
        """Write the rows of one path of a tree; consumes self."""
        return SharedPages(append_pages(value, key, start, Pages(self.pool, table)))


@register_state
@dataclass(frozen=True)
class LatentLayer(StaticLayer):
    """A dense layer whose model expands all cached rows to keys and values in each pass."""

    trees: ClassVar[bool] = False

    def update(self, key: Tensor, value: Tensor, view: CacheView) -> tuple[Tensor, Tensor, StaticLayer]:
        """Write the rows and return the buffers up to the last row; consumes self."""
        layer = self.write(view.rounded(key), view.rounded(value), view.start, view.count)
        seen = reach(view.start, key.shape[2], layer.key.shape[2])
        return view.rounded(layer.key[:, :, :seen]), view.rounded(layer.value[:, :, :seen]), layer

    def attend(self, inputs: AttentionInputs, view: CacheView) -> tuple[Tensor, StaticLayer]:
        """Attend causally to ``inputs.key``, which has all positions."""
        mask = view.mask(inputs, inputs.key.shape[2])
        return attend_densely(inputs, inputs.key, inputs.value, mask), self
