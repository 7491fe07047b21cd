"""Recurrent layers: a matrix for each head and the tail of a short convolution, per row of the batch."""

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
    """What a recurrent layer keeps of all rows so far; it cannot go back, so only accepted rows enter it.

    ``state`` is in float32 at least, whatever the model's type: it sums up every round. ``tail`` holds the
    last inputs of the convolution. Either is None where the layer has none; both, where it keeps nothing.
    On a mesh whose chips have heads of their own, ``tail`` is a tuple: its query, key and value channels.
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
        """The convolution of the rows behind those so far; a prompt's rows are taken in at once."""
        tail: Any = self.tail
        out = short_conv(tail, rows, weight, bias, view.tree)
        if view.count is None:
            return out, FreshState(self, rows=rows)
        return out, replace(self, tail=next_tail(tail, rows, view.count))

    def scan(self, rows: ScanRows, view: Any) -> tuple[Tensor, Any]:
        """The outputs of the rows behind those so far; a prompt's rows are taken in at once."""
        if view.count is None:
            return FreshState(self).scan(rows, view)
        state: Any = self.state
        out, state = scan_prompt(state, rows, view.count)
        return out, replace(self, state=state)

    def update(self, key: Tensor, value: Tensor, view: Any) -> Any:
        """No key or value comes here: the trace has seen none."""
        raise AssertionError("a recurrent layer has no keys and values")

    def attend(self, inputs: AttentionInputs, view: Any) -> Any:
        """No attention comes here: the trace has seen none."""
        raise AssertionError("a recurrent layer does not attend")

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> RecurrentLayer:
        """Nothing waits: the layer ran in no pass, or in one over a prompt."""
        return self

    def snapshot(self) -> RecurrentLayer:
        """All of it: later rows overwrite it."""
        return self

    def restore(self, snapshot: Any) -> RecurrentLayer:
        """What was taken."""
        return snapshot

    def reset(self, rows: Bool[Tensor, " B"]) -> RecurrentLayer:
        """Zeros in the rows marked."""
        return pytree.tree_map(lambda leaf: clear_rows(leaf, rows), self)


@register_state
@dataclass(frozen=True)
class FreshState:
    """A recurrent layer before a pass, and what the pass computed of its M rows; nothing is taken in yet.

    It stands in the layer's place from the pass to `commit`, inside of one round.
    """

    layer: RecurrentLayer
    rows: Float[Tensor, "B C M"] | None = None
    kept: Kept | None = None

    def scan(self, rows: ScanRows, view: Any) -> tuple[Tensor, FreshState]:
        """As `RecurrentLayer.scan`."""
        state: Any = self.layer.state
        out, kept = scan_block(state, rows, None if view.tree is None else view.tree.seen())
        return out, replace(self, kept=kept)

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> RecurrentLayer:
        """The layer behind the first ``count`` rows, or those of ``path``. No row is computed again."""
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
        """As the attention's cache."""
        key, value, own = self.attention.update(key, value, view)
        return key, value, replace(self, attention=own)

    def attend(self, inputs: AttentionInputs, view: Any) -> tuple[Tensor, BothLayer]:
        """As the attention's cache."""
        out, own = self.attention.attend(inputs, view)
        return out, replace(self, attention=own)

    def convolve(self, rows: Tensor, weight: Tensor, bias: Tensor | None, view: Any) -> tuple[Tensor, Any]:
        """As `RecurrentLayer.convolve`."""
        out, own = self.recurrent.convolve(rows, weight, bias, view)
        return out, replace(self, recurrent=own)

    def scan(self, rows: ScanRows, view: Any) -> tuple[Tensor, BothLayer]:
        """As `RecurrentLayer.scan`."""
        out, own = self.recurrent.scan(rows, view)
        return out, replace(self, recurrent=own)

    def commit(self, count: Int[Tensor, " B"], path: Int[Tensor, "B path"] | None) -> BothLayer:
        """Of both."""
        return BothLayer(self.attention.commit(count, path), self.recurrent.commit(count, path))

    def snapshot(self) -> RecurrentLayer:
        """Of the recurrent part."""
        return self.recurrent.snapshot()

    def restore(self, snapshot: Any) -> BothLayer:
        """With the recurrent part that was taken."""
        return replace(self, recurrent=self.recurrent.restore(snapshot))

    def reset(self, rows: Bool[Tensor, " B"]) -> BothLayer:
        """Of both."""
        return BothLayer(self.attention.reset(rows), self.recurrent.reset(rows))


def kept_in_model_type(cache: tuple) -> list[Tensor]:
    """What layers keep in the model's own type: all but recurrent states."""

    def bare(node: Any) -> Any:
        return node.tail if isinstance(node, RecurrentLayer) else node

    found = pytree.tree_map(bare, cache, is_leaf=lambda node: isinstance(node, RecurrentLayer))
    return [leaf for leaf in pytree.tree_leaves(found) if leaf is not None and leaf.is_floating_point()]
