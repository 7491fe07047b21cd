"""Prompt lookup beside a drafter: the text's own continuation where it repeats itself, else the drafter's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.accept import drafted_by
from torch_dflash.ops.control_flow import branch
from torch_dflash.proposers.base import Cost, Proposer
from torch_dflash.proposers.composed import Composed
from torch_dflash.proposers.ngram import NGramProposer
from torch_dflash.pytrees import register_state
from torch_dflash.state import Asked, Draft

LONG = 2
"""Tokens of a match from which on lookup is right more often than the drafter (`docs/proposers.md`)."""


@register_state
@dataclass(frozen=True)
class UnionState:
    """The states of both."""

    lookup: Any
    inner: Any

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Tokens that lookup has taken in; a drafter that counts its own has as many."""
        return self.lookup.committed


class UnionProposer(Proposer):
    """Lookup's draft where its match is `LONG` tokens or more, else the other's.

    The other's pass is left out in a round in which no row needs it.

    Args:
        inner: the other proposer, of which the union has width and taps.
        most: rows of a draft of lookup at most, the anchor included. max_ngram: as in `NGramProposer`.
    """

    def __init__(self, inner: Proposer, most: int, max_ngram: int):
        super().__init__()
        self.name = f"{NGramProposer.name} or {inner.name}"
        self.taps, self.width = inner.taps, inner.width
        self.most, self.max_ngram = min(most, inner.width), max_ngram
        self.lookup, self.inner = NGramProposer(max(inner.width, 2), max_ngram), inner

    def start(self, plan, device) -> UnionState:
        return UnionState(self.lookup.start(plan, device), self.inner.start(plan, device))

    def reset(self, pstate, rows) -> UnionState:
        return UnionState(self.lookup.reset(pstate.lookup, rows), self.inner.reset(pstate.inner, rows))

    def earliest(self, pstate, length) -> int:
        return self.inner.earliest(pstate.inner, length)  # lookup can go back to any

    def snapshot(self, pstate) -> Any:
        return self.inner.snapshot(pstate.inner)

    def rewind(self, pstate, kept, snapshot=None) -> UnionState:
        inner = self.inner.rewind(pstate.inner, kept, snapshot)
        return UnionState(self.lookup.rewind(pstate.lookup, kept), inner)

    def ingest(self, pstate, features, ids, next_ids, count) -> UnionState:
        rows = features, ids, next_ids, count
        return UnionState(self.lookup.ingest(pstate.lookup, *rows), self.inner.ingest(pstate.inner, *rows))

    def observe(self, pstate, features, ids, next_ids, count) -> UnionState:
        rows = features, ids, next_ids, count
        return UnionState(self.lookup.observe(pstate.lookup, *rows), self.inner.observe(pstate.inner, *rows))

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, UnionState]:
        return self._draft(pstate, anchor, length, embed, head, None)

    def draft(self, pstate, anchor, length, embed, head, asked) -> tuple[Draft, UnionState]:
        return self._draft(pstate, anchor, length, embed, head, asked)

    def skip(self, pstate, anchor, length, embed, head) -> UnionState:
        return UnionState(pstate.lookup, self.inner.skip(pstate.inner, anchor, length, embed, head))

    def cost(self, plan, context) -> Cost:
        return self.inner.cost(plan, context)

    def _draft(self, pstate, anchor, length, embed, head, asked: Asked | None) -> tuple[Draft, UnionState]:
        found, lookup = self.lookup.look_up(pstate.lookup, anchor, length)
        long = found.matched >= LONG

        def drafted(state, anchor, length):
            given = state, anchor, length, embed, head
            proposed = self.inner.propose(*given) if asked is None else self.inner.draft(*given, asked)
            draft, state = drafted_by(self.inner, proposed)
            return draft.tokens.to(torch.int32), draft.valid.to(torch.int32), state

        def spared(state, anchor, length):
            none = torch.zeros(len(anchor), self.width - 1, dtype=torch.int32, device=anchor.device)
            return none, torch.zeros_like(none[:, 0]), self.inner.idle(state, anchor, length, embed, head)

        tokens, valid, inner = branch(long.all(), spared, drafted, pstate.inner, anchor, length)
        tokens = torch.where(long[:, None], found.tokens[:, : self.width - 1], tokens)
        valid = torch.where(long, self.most - 1, valid)
        return Draft(tokens, valid.to(torch.int32)), UnionState(lookup, inner)


@dataclass(frozen=True)
class UnionRecipe:
    """A `UnionProposer` of these arguments."""

    most: int
    max_ngram: int

    def build(self, inner: Proposer) -> Proposer:
        return UnionProposer(inner, self.most, self.max_ngram)


class Union(Composed):
    """Prompt lookup beside a drafter: pass ``td.Union(td.NGramProposer(), drafter)`` as ``drafter``.

    A row drafts what lookup finds if it matches two tokens or more, else what ``drafter`` says. Both take in
    all text, and rounds are as wide as the drafter's.

    Args:
        lookup: an `NGramProposer`; its ``width`` is the most tokens it drafts, the anchor included.
        drafter: a `DFlashDraftModel`, or another proposer that drafts at least one token.

    Raises:
        TypeError: they are something else, or in another order.
    """

    def __init__(self, lookup: NGramProposer, drafter: Any):
        if not isinstance(lookup, NGramProposer):
            raise TypeError(
                f"lookup={type(lookup).__name__}: pass td.NGramProposer() first, then the drafter."
            )
        if drafter is None or isinstance(drafter, Composed):
            given = None if drafter is None else type(drafter).__name__
            raise TypeError(f"drafter={given}: pass a drafter of td.load_drafter, or a proposer.")
        super().__init__(drafter, UnionRecipe(lookup.width, lookup.max_ngram))
