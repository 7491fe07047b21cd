"""Caches of recurrent layers: a state matrix for each head and the tail of a short convolution, per row."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dflash.cache.spec import LayerSpec
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.lowerable import lowerable
from torch_dflash.ops.recurrence import Kept, ScanRows, at_least_float32, scan_block, scan_prompt, state_after
from torch_dflash.ops.short_conv import next_tail, short_conv
from torch_dflash.ops.windows import clear_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class RecurrentLayer:
    """State of a recurrent layer; a round cannot be undone, so only accepted rows enter the state.

    ``state`` is float32 or float64, whatever the model's type: errors of every round would add up. ``tail``
    holds the last inputs of the convolution. Both are None in a layer without state. On a mesh that shards
    heads, ``tail`` is a tuple of its query, key and value channels.
    """

    state: Float[Tensor, "B H dk dv"] | None
    tail: Float[Tensor, "B C before"] | None
    trees: ClassVar[bool] = True

    @classmethod
    def allocate(cls, spec: LayerSpec, plan: DecodePlan, dtype: torch.dtype, device) -> RecurrentLayer:
        """Zeros: the state and tail before the first row."""

        def zeros(shape: tuple[int, ...] | None, kind: torch.dtype) -> Any:
            return None if shape is None else torch.zeros(plan.batch_size, *shape, dtype=kind, device=device)

        return cls(zeros(spec.scan, at_least_float32(dtype)), zeros(spec.conv, dtype))

    def convolve(
        self, rows: Float[Tensor, "B C M"], weight: Tensor, bias: Tensor | None, view: Any
    ) -> tuple[Tensor, Any]:
        """The convolution of the new rows; the tail takes in a prompt's rows at once."""
        tail: Any = self.tail
        out = short_conv(tail, rows, weight, bias, view.tree)
        if view.count is None:
            return out, FreshState(self, rows=rows)
        return out, replace(self, tail=next_tail(tail, rows, view.count))

    def scan(self, rows: ScanRows, view: Any) -> tuple[Tensor, Any]:
        """The outputs of the new rows; the state takes in a prompt's rows at once."""
        if view.count is None:
            return FreshState(self).scan(rows, view)
        state: Any = self.state
        out, state = scan_prompt(state, rows, view.count)
        return out, replace(self, state=state)

    def update(self, key: Tensor, value: Tensor, view: Any) -> Any:
        """Unreachable: the trace found no keys and values."""
        raise AssertionError("a recurrent layer has no keys and values")

    def attend(self, inputs: AttentionInputs, view: Any) -> Any:
        """Unreachable: the trace found no attention."""
        raise AssertionError("a recurrent layer does not attend")

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> RecurrentLayer:
        """Nothing to commit: the layer did not run, or took in a prompt."""
        return self

    def snapshot(self) -> RecurrentLayer:
        """The whole layer: later rows overwrite the state."""
        return self

    def restore(self, snapshot: Any) -> RecurrentLayer:
        return snapshot

    def reset(self, rows: Bool[Tensor, " B"]) -> RecurrentLayer:
        return pytree.tree_map(lambda leaf: clear_rows(leaf, rows), self)


@register_state
@dataclass(frozen=True)
class FreshState:
    """A recurrent layer before a pass, and the values that the pass computed for its M rows.

    Replaces the layer from the pass to `commit`, within one round.
    """

    layer: RecurrentLayer
    rows: Float[Tensor, "B C M"] | None = None
    kept: Kept | None = None

    def scan(self, rows: ScanRows, view: Any) -> tuple[Tensor, FreshState]:
        state: Any = self.layer.state
        out, kept = scan_block(state, rows, None if view.tree is None else view.tree.seen())
        return out, replace(self, kept=kept)

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> RecurrentLayer:
        """The layer after the first ``count`` rows, or those of ``path``, without computing a row again."""
        return absorb(count, self, path)


@lowerable
def absorb(count: Int[Tensor, " B"], fresh: FreshState, path: Int[Tensor, "B path"] | None) -> RecurrentLayer:
    """`FreshState.commit`."""
    state: Any = fresh.layer.state
    tail: Any = fresh.layer.tail
    if fresh.kept is not None:
        state = state_after(state, fresh.kept, count, path)
    if fresh.rows is not None:
        tail = next_tail(tail, fresh.rows, count, path)
    return RecurrentLayer(state, tail)


@register_state
@dataclass(frozen=True)
class BothLayer:
    """A layer that attends and recurs side by side, as Falcon-H1's do."""

    attention: Any
    recurrent: Any

    def update(self, key: Tensor, value: Tensor, view: Any) -> tuple[Tensor, Tensor, BothLayer]:
        key, value, own = self.attention.update(key, value, view)
        return key, value, replace(self, attention=own)

    def attend(self, inputs: AttentionInputs, view: Any) -> tuple[Tensor, BothLayer]:
        out, own = self.attention.attend(inputs, view)
        return out, replace(self, attention=own)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, view: Any) -> tuple[Tensor, Any]:
        out, own = self.recurrent.convolve(rows, weight, bias, view)
        return out, replace(self, recurrent=own)

    def scan(self, rows: ScanRows, view: Any) -> tuple[Tensor, BothLayer]:
        out, own = self.recurrent.scan(rows, view)
        return out, replace(self, recurrent=own)

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> BothLayer:
        return BothLayer(self.attention.commit(count, path), self.recurrent.commit(count, path))

    def snapshot(self) -> RecurrentLayer:
        """The recurrent part's: later rows leave earlier keys and values as they are."""
        return self.recurrent.snapshot()

    def restore(self, snapshot: Any) -> BothLayer:
        return replace(self, recurrent=self.recurrent.restore(snapshot))

    def reset(self, rows: Bool[Tensor, " B"]) -> BothLayer:
        return BothLayer(self.attention.reset(rows), self.recurrent.reset(rows))


def model_dtype_leaves(cache: tuple) -> list[Tensor]:
    """Cached tensors in the model's dtype: all but recurrent states."""

    def bare(node: Any) -> Any:
        return node.tail if isinstance(node, RecurrentLayer) else node

    found = pytree.tree_map(bare, cache, is_leaf=lambda node: isinstance(node, RecurrentLayer))
    return [leaf for leaf in pytree.tree_leaves(found) if leaf is not None and leaf.is_floating_point()]
