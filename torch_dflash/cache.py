"""The target's cache: what each layer keeps, how rows are written, and the face Hugging Face models see."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from torch_dflash.rows import write_rows
from torch_dflash.state import DecodePlan, register_state


@dataclass(frozen=True)
class LayerSpec:
    """One target layer's cache needs, as seen in a traced forward (`torch_dflash.target.trace_layers`)."""

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

    def write(self, key: Tensor, value: Tensor, start: Int[Tensor, " B"]) -> StaticLayer:
        """Put [B, G, M, D] rows at ``start`` [B]; consumes self."""
        return StaticLayer(
            write_rows(self.key, key, start, dim=2), write_rows(self.value, value, start, dim=2)
        )

    def commit(self, commit) -> StaticLayer:
        """A chain's accepted rows already stand where they belong."""
        return self


def allocate(spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> StaticLayer:
    """Zeroed buffers of one layer: [B, G, S, D] keys and [B, G, S, Dv] values."""
    shape = (plan.batch_size, spec.heads, plan.slots)
    # Zeros, not empty: a masked slot still meets a zero weight, and 0 * NaN would be NaN.
    return StaticLayer(
        torch.zeros(*shape, spec.k_dim, dtype=dtype, device=device),
        torch.zeros(*shape, spec.v_dim, dtype=dtype, device=device),
    )


class CacheView(Cache):
    """The cache of one forward, as Hugging Face attention modules call it.

    ``update`` writes the layer's rows at each row's own offset and returns the whole buffers; the mask
    decides what is seen. After the forward, ``states`` holds the new layer states.
    """

    def __init__(self, states: tuple[StaticLayer, ...], start: Int[Tensor, " B"]):
        super().__init__(layers=[])
        self.states = list(states)
        self.start = start

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer = self.states[layer_idx].write(key_states, value_states, self.start)
        self.states[layer_idx] = layer
        return layer.key, layer.value

    def get_seq_length(self, layer_idx=0):
        return 0  # positions and masks are always given, so no model may derive them from here


class RecordingCache(Cache):
    """Notes what each layer hands to ``update``; run once on meta tensors to learn the layers' shapes."""

    def __init__(self):
        super().__init__(layers=[])
        self.shapes: dict[int, tuple[int, int, int]] = {}

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        self.shapes[layer_idx] = (key_states.shape[1], key_states.shape[3], value_states.shape[3])
        return key_states, value_states

    def get_seq_length(self, layer_idx=0):
        return 0
