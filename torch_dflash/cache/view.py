"""The cache as Hugging Face models see it in one forward."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.cache_utils import Cache

from torch_dflash.ops.attention import Rows, finite_values, visible


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
