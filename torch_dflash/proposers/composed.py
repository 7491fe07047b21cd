"""Several proposers behind one: each takes in all text and keeps its own state."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from itertools import chain
from typing import Any

from jaxtyping import Int
from torch import Tensor, nn

from torch_dflash.proposers.base import Cost, Proposer, take_in
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class States:
    """The states of the parts, in their order."""

    parts: tuple

    @property
    def committed(self) -> Int[Tensor, " B"] | None:
        """Tokens taken in, by the first part that counts them; equal for all parts."""
        counted = (getattr(part, "committed", None) for part in self.parts)
        return next((count for count in counted if count is not None), None)


class Several(Proposer):
    """Base of proposers with several parts; subclasses write `draft`.

    Args:
        inner: the last part, with the weights and the taps. others: the parts before.
    """

    def __init__(self, inner: Proposer, others: tuple[Proposer, ...]):
        super().__init__()
        self.inner, self.others, self.taps = inner, nn.ModuleList(others), inner.taps
        self.ahead = max(part.ahead for part in self.parts)

    @property
    def drafter(self) -> Any:
        """The network of ``inner``; None without weights."""
        return getattr(self.inner, "drafter", None)

    @property
    def parts(self) -> tuple[Any, ...]:
        """All parts, ``inner`` last."""
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

    def ingest(self, pstate, features, ids, next_ids, count, embed=None) -> States:
        given = features, ids, next_ids, count, embed
        return self._each(pstate, lambda part, state: take_in(part.ingest, state, *given))

    def verified(self, pstate, ids, picks) -> States:
        """Pass no rows on: a round's rows are some of all parts' nodes, and no part drafted them alone."""
        return pstate

    def observe(self, pstate, features, ids, next_ids, count, embed=None) -> States:
        given = features, ids, next_ids, count, embed
        return self._each(pstate, lambda part, state: take_in(part.observe, state, *given))

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
    """A user's ``drafter`` within another ``kind`` of proposer.

    Engines refer to the drafter alone, and weakly. A drafter composed anew for each call finds its engine by
    ``key``.

    Args:
        drafter: the part with the weights.
        kind: called with the drafter's proposer, copies of ``others``, and ``rows``.
        others: proposers without weights that have a ``key``. rows: of a tree; None: drafts are chains.
    """

    def __init__(self, drafter: Any, kind: Any, others: tuple[Any, ...], rows: int | None):
        self.drafter, self.kind, self.others, self.rows = drafter, kind, others, rows
        self.key = kind, tuple((type(one), one.key) for one in others), rows

    def around(self, drafter: Any) -> Composed:
        """The same composition around another ``drafter``."""
        return Composed(drafter, self.kind, self.others, self.rows)

    def build(self, inner: Proposer) -> Proposer:
        """The engine's proposer: holds ``inner``, and copies of the user's other proposers."""
        return self.kind(inner, copy.deepcopy(self.others), self.rows)


def inner_of(drafter: Any) -> Any:
    """The drafter with the weights, unwrapped."""
    return drafter.drafter if isinstance(drafter, Composed) else drafter


def holds_tensors(proposer: nn.Module) -> bool:
    """Whether ``proposer`` has parameters or buffers."""
    return next(chain(proposer.parameters(), proposer.buffers()), None) is not None


def key_of(drafter: Any) -> tuple | None:
    """The key of a `Composed`, which does not depend on its drafter; None for other drafters."""
    return drafter.key if isinstance(drafter, Composed) else None
