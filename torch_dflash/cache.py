"""The target's cache: what each layer keeps, and the face Hugging Face models see."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from torch_dflash.ops.attention import KeyValue, Rows, finite_values, grouped_attention, visible
from torch_dflash.ops.windows import write_rows
from torch_dflash.paged import PagedLayer, allocate_pool
from torch_dflash.state import DecodePlan, register_state


@dataclass(frozen=True)
class LayerSpec:
    """One target layer's cache needs, as seen in a traced forward (`torch_dflash.tracing.trace_layers`).

    ``kind``: "attention" where the cached rows are what is attended to, "latent" where the model expands
    what it has cached (multi-head latent attention).
    """

    kind: str
    heads: int
    k_dim: int
    v_dim: int
    window: int | None


@register_state
@dataclass(frozen=True)
class StaticLayer:
    """Dense K/V of one layer. Row b holds positions ``0 .. length[b]-1``; what lies beyond is stale.

    Rollback is not advancing ``length``: stale slots are behind every mask until they are overwritten.
    """

    key: Float[Tensor, "B G S D"]
    value: Float[Tensor, "B G S Dv"]

    axes = ("B", "G", "S", "D")

    def write(
        self, key: Tensor, value: Tensor, start: Int[Tensor, " B"], count: Int[Tensor, " B"] | None = None
    ) -> StaticLayer:
        """Put [B, G, M, D] rows, or the first ``count`` [B] of them, at ``start`` [B]; consumes self."""
        return StaticLayer(
            write_rows(self.key, key, start, dim=2, count=count),
            write_rows(self.value, value, start, dim=2, count=count),
        )

    def update(self, key: Tensor, value: Tensor, view: CacheView) -> tuple[Tensor, Tensor, StaticLayer]:
        """What the attention module goes on with: its own rows, for ``attend`` does the rest."""
        return key, value, self

    def attend(self, rows: Rows, view: CacheView) -> tuple[Tensor, StaticLayer]:
        """Write the rows' K and V, attend causally to all positions so far; consumes self."""
        layer = self.write(rows.key, rows.value, view.start, view.count)
        return attend_densely(rows, layer.key, layer.value, view.mask(rows, layer.key.shape[2])), layer

    def positions(self, length: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
        """The position each slot holds when ``length`` [B] are committed, -1 for none."""
        slots = torch.arange(self.key.shape[2], device=length.device, dtype=length.dtype)
        return torch.where(slots < length[:, None], slots, -1)

    def commit(self, commit) -> StaticLayer:
        """A chain's accepted rows already stand where they belong."""
        return self


@register_state
@dataclass(frozen=True)
class LatentLayer(StaticLayer):
    """A dense layer whose model computes keys and values anew from all it has cached."""

    def update(self, key: Tensor, value: Tensor, view: CacheView) -> tuple[Tensor, Tensor, LatentLayer]:
        """Write the rows, hand out the whole buffers; consumes self."""
        layer = self.write(key, value, view.start, view.count)
        return layer.key, layer.value, LatentLayer(layer.key, layer.value)

    def attend(self, rows: Rows, view: CacheView) -> tuple[Tensor, LatentLayer]:
        """Attend causally to the rows, which are of all positions."""
        return attend_densely(rows, rows.key, rows.value, view.mask(rows, rows.key.shape[2])), self


def attend_densely(rows: Rows, key: Tensor, value: Tensor, mask: Tensor | None) -> Float[Tensor, "B M Q Dv"]:
    """Attention of the rows to dense keys and values, with the rows' own scale, sinks and soft cap."""
    part = KeyValue(key, value, mask)
    return grouped_attention(rows.query, [part], rows.scale, sinks=rows.sinks, softcap=rows.softcap)


def allocate(spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> StaticLayer | PagedLayer:
    """An empty cache of one layer, of the plan's kind."""
    if plan.cache == "paged":
        return allocate_pool(spec, plan, dtype, device)
    kind = LatentLayer if spec.kind == "latent" else StaticLayer
    return allocate_static(spec, plan, dtype, device, kind)


def check_specs(specs: tuple[LayerSpec, ...], plan: DecodePlan) -> None:
    """Raise ``ValueError`` for a latent layer in a paged cache."""
    if plan.cache == "paged" and any(spec.kind == "latent" for spec in specs):
        raise ValueError(
            "cache='paged': the target's layers expand what they cache (latent attention); choose 'static'."
        )


def allocate_static(
    spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device, kind: type[StaticLayer] = StaticLayer
) -> StaticLayer:
    """Zeroed buffers of one layer: [B, G, S, D] keys and [B, G, S, Dv] values."""
    shape = (plan.batch_size, spec.heads, plan.slots)
    # Zeros, not empty: a masked slot still meets a zero weight, and 0 * NaN would be NaN.
    return kind(
        torch.zeros(*shape, spec.k_dim, dtype=dtype, device=device),
        torch.zeros(*shape, spec.v_dim, dtype=dtype, device=device),
    )


class CacheView(Cache):
    """The cache of one forward of M rows per sequence, at positions ``start .. start+M-1``.

    Hugging Face attention modules call ``update`` with new rows; our attention function, which they call
    next, calls ``attend``, which also sees queries. After the forward, ``states`` holds the new layer states.

    Args:
        windows: each layer's sliding window, None for none.
        table: page numbers [B, T], where the layers are paged.
        count: of a prompt chunk, how many rows of each sequence are real.
        said: the answer to how many tokens are cached. Rows differ, so nothing may depend on it.
    """

    def __init__(
        self,
        states: tuple,
        windows: tuple[int | None, ...],
        start: Int[Tensor, " B"],
        table: Int[Tensor, "B T"] | None = None,
        count: Int[Tensor, " B"] | None = None,
        said: int = 0,
    ):
        super().__init__(layers=[])
        self.said = said
        self.states, self.windows = list(states), windows
        self.start, self.table, self.count = start, table, count
        self._masks: dict[int | None, Tensor] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        key, value, self.states[layer_idx] = self.states[layer_idx].update(key_states, value_states, self)
        return key, value

    def attend(self, layer_idx: int, rows: Rows, *_: Any) -> Float[Tensor, "B M Q Dv"]:
        """The layer's attention of these rows; their K and V are kept, as `finite_values` has them."""
        key, value = finite_values(rows.key, rows.value)
        rows = rows._replace(key=key, value=value, window=self.windows[layer_idx])
        out, self.states[layer_idx] = self.states[layer_idx].attend(rows, self)
        return out

    def mask(self, rows: Rows, slots: int) -> Tensor:
        """Which of ``slots`` dense positions each row sees, made once for all layers of a window."""
        if rows.window not in self._masks:
            at = torch.arange(rows.query.shape[2], device=self.start.device, dtype=self.start.dtype)
            slot = torch.arange(slots, device=self.start.device, dtype=self.start.dtype)[None]
            self._masks[rows.window] = visible(self.start[:, None] + at, slot, rows.window, causal=True)
        return self._masks[rows.window]

    def get_seq_length(self, layer_idx=0):
        return self.said  # positions and masks are always given, so no model may derive them from here
