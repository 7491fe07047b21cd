"""Several proposers behind one: each takes in all text and keeps its own state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from torch_dflash.proposers.base import Cost, Proposer
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class States:
    """The states of the parts, in their order."""

    parts: tuple

    @property
    def committed(self) -> Int[Tensor, " B"] | None:
        """Tokens that the first part that counts them has taken in: all have as many."""
        counted = (getattr(part, "committed", None) for part in self.parts)
        return next((count for count in counted if count is not None), None)


class Several(Proposer):
    """What proposers of several parts share; subclasses write `draft`.

    Args:
        inner: the part that has weights, and the taps; the last one.
        others: the parts before it.
    """

    def __init__(self, inner: Proposer, others: tuple[Proposer, ...]):
        super().__init__()
        self.inner, self.others, self.taps = inner, nn.ModuleList(others), inner.taps

    @property
    def drafter(self) -> Any:
        """The network of the part that has weights; None: that part has none."""
        return getattr(self.inner, "drafter", None)

    @property
    def parts(self) -> tuple[Any, ...]:
        """All of them."""
        return *self.others, self.inner

    def start(self, plan, device) -> States:
        return States(tuple(part.start(plan, device) for part in self.parts))

    def reset(self, pstate, rows) -> States:
        return self._each(pstate, lambda part, state: part.reset(state, rows))

    def earliest(self, pstate, length) -> int:
        return max(part.earliest(state, length) for part, state in self._pairs(pstate))

    def snapshot(self, pstate) -> States:
        return self._each(pstate, lambda part, state: part.snapshot(state))

    def rewind(self, pstate, kept, snapshot=None) -> States:
        saved = (None,) * len(self.parts) if snapshot is None else snapshot.parts
        pairs = zip(self._pairs(pstate), saved, strict=True)
        return States(tuple(part.rewind(state, kept, one) for (part, state), one in pairs))

    def ingest(self, pstate, features, ids, next_ids, count) -> States:
        return self._each(pstate, lambda part, state: part.ingest(state, features, ids, next_ids, count))

    def observe(self, pstate, features, ids, next_ids, count) -> States:
        return self._each(pstate, lambda part, state: part.observe(state, features, ids, next_ids, count))

    def skip(self, pstate, anchor, length, embed, head) -> States:
        return self._each(pstate, lambda part, state: part.skip(state, anchor, length, embed, head))

    def idle(self, pstate, anchor, length, embed, head) -> States:
        return self._each(pstate, lambda part, state: part.idle(state, anchor, length, embed, head))

    def cost(self, plan, context) -> Cost:
        return self.inner.cost(plan, context)

    def _pairs(self, pstate: States) -> Any:
        return zip(self.parts, pstate.parts, strict=True)

    def _each(self, pstate: States, step: Any) -> States:
        return States(tuple(step(part, state) for part, state in self._pairs(pstate)))


class Composed:
    """A ``drafter`` of the user's, and the ``kind`` of proposer that is made of it.

    Engines refer to the drafter alone, and weakly: a drafter that is composed anew for each call finds its
    engine by ``key``.

    Args:
        drafter: the part that has weights.
        kind: called with the drafter's proposer, copies of ``others``, and ``rows``.
        others: proposers without weights that have a ``key``. rows: of a tree; None: drafts are chains.
    """

    def __init__(self, drafter: Any, kind: Any, others: tuple[Any, ...], rows: int | None):
        self.drafter, self.kind, self.others, self.rows = drafter, kind, others, rows
        self.key = kind, tuple((type(one), one.key) for one in others), rows

    def around(self, drafter: Any) -> Composed:
        """The same of another ``drafter``."""
        return Composed(drafter, self.kind, self.others, self.rows)

    def build(self, inner: Proposer) -> Proposer:
        """The proposer that keeps ``inner`` under that name, and no object of the user's."""
        return self.kind(inner, copy.deepcopy(self.others), self.rows)


def inner_of(drafter: Any) -> Any:
    """The drafter with the weights, unwrapped."""
    return drafter.drafter if isinstance(drafter, Composed) else drafter


def key_of(drafter: Any) -> tuple | None:
    """The key of a `Composed`, equal for all that differ in the drafter alone; None: any other drafter."""
    return drafter.key if isinstance(drafter, Composed) else None
