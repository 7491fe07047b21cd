"""The cache that Hugging Face models get in one forward."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast

from torch_dflash.ops.attention import AttentionInputs, finite_values, visible
from torch_dflash.ops.spread import marked
from torch_dflash.ops.trees import Tree
from torch_dflash.ops.windows import positions, reach


class CacheView(Cache):
    """The cache of one forward of M rows per sequence, at positions ``start .. start+M-1``.

    Hugging Face attention modules call ``update`` with new rows; our attention function, which they call
    next, calls ``attend`` with queries too. After the forward, ``states`` holds the new layer states.

    Args:
        windows: each layer's sliding window, None for none.
        table: page numbers [B, row_pages], where the layers are paged.
        count: real rows [B] of a prompt chunk.
        reported_length: the answer to `get_seq_length`. Rows differ, so no model may depend on it.
        tree: the tree of the rows, if they are one.
        dtype: the type that keys and values are rounded to; a program may keep them in a wider one; unset:
            the buffers'.
    """

    def __init__(
        self,
        states: tuple,
        windows: tuple[int | None, ...],
        start: Int[Tensor, " B"],
        table: Int[Tensor, "B row_pages"] | None = None,
        count: Int[Tensor, " B"] | None = None,
        reported_length: int = 0,
        dtype: torch.dtype | None = None,
        tree: Tree | None = None,
    ):
        super().__init__(layers=[])
        self.reported_length, self.dtype = reported_length, dtype
        self.states, self.windows = list(states), windows
        self.start, self.table, self.count, self.tree = start, table, count, tree
        self._masks: dict[int | None, Tensor] = {}
        self._choice: tuple[Tensor, Tensor] | None = None
        self._choosable = 0  # slots
        self._layer = -1  # the layer that last asked for a recurrent state

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        key, value, self.states[layer_idx] = self.states[layer_idx].update(key_states, value_states, self)
        return key, value

    def expands(self, layer_idx: int) -> bool:
        """Whether the layer attends to what ``AttentionInputs.expand`` makes of latents: in prompts alone.

        A block of any width absorbs, as the plain step does: half precision rounds the two forms differently.
        """
        return self.count is not None and getattr(self.states[layer_idx], "expands", False)

    def attend(
        self, layer_idx: int, inputs: AttentionInputs, _: Any = None, more: dict[str, Any] | None = None
    ) -> Float[Tensor, "B M Q Dv"]:
        """The layer's attention of these rows; the cache keeps their K and V as `finite_values` has them."""
        if more and more.get("indices") is not None:
            inputs = inputs._replace(chosen=self.chosen(more["indices"]))
        key, value = finite_values(self.rounded(inputs.key), self.rounded(inputs.value))
        inputs = inputs._replace(key=key, value=value, window=self.windows[layer_idx], tree=self.tree)
        out, self.states[layer_idx] = self.states[layer_idx].attend(inputs, self)
        return out

    def mask(self, inputs: AttentionInputs, slots: int) -> Bool[Tensor, "B one M S"]:
        """The dense positions that each row sees, up to the last row's; shared by all layers of a window."""
        if inputs.window not in self._masks:
            rows = inputs.query.shape[2]
            at, seen = positions(self.start, rows), reach(self.start, rows, slots)
            slot = torch.arange(seen, device=at.device, dtype=at.dtype)[None]
            self._masks[inputs.window] = visible(at, slot, inputs.window, causal=True)
        mask = self._masks[inputs.window]
        return mask if inputs.chosen is None else mask & inputs.chosen

    def choosable(self, layer_idx: int, rows: int) -> Bool[Tensor, "B one M S"]:
        """The positions that indexers may choose for each row, in the slots of `update_indexer`.

        ``layer_idx``: a layer with an indexer; all of these have as many slots.
        """
        self._choosable = self.states[layer_idx].index.slots(rows, self)
        at = positions(self.start, rows)
        slot = torch.arange(self._choosable, device=at.device, dtype=at.dtype)[None]
        return visible(at, slot, None, causal=True)

    def update_indexer(self, rows: Float[Tensor, "B M D"], layer_idx: int) -> Float[Tensor, "B S D"]:
        """Keep the keys of a layer's indexer; returns all so far."""
        keys, self.states[layer_idx] = self.states[layer_idx].extended(rows[:, None], self)
        return keys

    def chosen(self, indices: Int[Tensor, "B M K"]) -> Bool[Tensor, "B one M S"]:
        """A choice as a mask; layers that share the choice share the mask."""
        if self._choice is None or self._choice[0] is not indices:
            self._choice = indices, marked(indices, self._choosable)[:, None]
        return self._choice[1]

    def get_conv_state(self, layer_idx, state_idx=0):
        return None  # so that every pass has several rows: passes of one row write states in place

    def get_recurrent_state(self, layer_idx, state_idx=0):
        self._layer = layer_idx

    def update_conv_state(self, conv_states, layer_idx, *args, **kwargs):
        self._layer = layer_idx
        return conv_states  # `convolve` adds the cached ones

    def update_recurrent_state(self, recurrent_states, *args, **kwargs):
        return recurrent_states  # `scan` has updated the state

    def is_recording_past(self, layer_idx):
        return True

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None) -> Float[Tensor, "B C M"]:
        """The running layer's convolution of its rows [B, C, M]."""
        out, self.states[self._layer] = self.states[self._layer].convolve(rows, weight, bias, self)
        return out

    def scan(self, rows: Any) -> Float[Tensor, "B H M dv"]:
        """The running layer's scan of its `ScanRows`."""
        out, self.states[self._layer] = self.states[self._layer].scan(rows, self)
        return out

    def rounded(self, rows: Tensor) -> Tensor:
        """Keys or values in the type that the cache has between programs."""
        return rows if self.dtype is None else rows.to(self.dtype)

    def get_seq_length(self, layer_idx=0):
        # Positions and masks are always given: no model may derive them from here.
        return self.reported_length


CACHE = "cache"
if all(field.name != CACHE for field in fields(BaseModelOutputWithPast)):
    CACHE = "past_key_values"
