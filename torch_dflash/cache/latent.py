"""Layers whose model caches a latent and computes keys and values from it (DeepSeek's MLA)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

from torch_dflash.cache.dense import StaticLayer, attend_densely
from torch_dflash.cache.view import CacheView
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.windows import reach
from torch_dflash.pytrees import register_state


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
