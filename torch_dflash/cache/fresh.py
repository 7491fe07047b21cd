"""Rows that a pass over a tree has made: a layer takes in those of one path when it is known which."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.trees import take_rows
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class FreshRows:
    """A layer before a pass over a tree, and what the pass made of its M rows; nothing is written yet.

    It stands in the layer's place from the pass to `commit`, inside of one round.
    """

    layer: Any
    key: Float[Tensor, "B G M D"]
    value: Float[Tensor, "B G M Dv"]
    start: Int[Tensor, " B"]
    table: Int[Tensor, "B row_pages"] | None

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> Any:
        """The layer with the rows ``path`` behind what it holds; the first ``count`` of them count."""
        assert path is not None, "a tree without a path"
        key, value = take_rows(self.key, path, dim=2), take_rows(self.value, path, dim=2)
        return self.layer.append(key, value, self.start, self.table)
