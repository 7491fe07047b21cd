"""`Union`: prompt lookup and a drafter, in one tree or taking turns."""

from __future__ import annotations

from typing import Any

import torch

from torch_dflash.accept import drafted_by
from torch_dflash.ops.control_flow import branch
from torch_dflash.proposers.base import Proposer
from torch_dflash.proposers.composed import Composed, Several, States, holds_tensors
from torch_dflash.proposers.ngram import NGramProposer
from torch_dflash.proposers.trees.proposer import BestNodes, check_tree_rows
from torch_dflash.state import Draft, DraftRequest

LONG = 2
"""Tokens of a match from which on lookup is right more often than the drafter (`docs/proposers.md`)."""


class UnionProposer(Several):
    """Lookup's draft where its match is `LONG` tokens or more, else the draft of ``inner``.

    ``inner`` makes no pass in a round in which no row needs it.

    Args:
        inner: the other proposer; gives width and taps.
        others: lookup; its ``width`` is the most rows it drafts here, the anchor included. rows: None.
    """

    def __init__(self, inner: Proposer, others: tuple[NGramProposer], rows: None = None):
        (given,) = others
        lookup = NGramProposer(max(inner.width, 2), given.max_ngram)
        super().__init__(inner, (lookup,))
        self.name = f"{lookup.name} or {inner.name}"
        self.lookup, self.width, self.most = lookup, inner.width, min(given.width, inner.width)

    def draft(self, pstate, anchor, length, embed, head, request) -> tuple[Draft, States]:
        return self.propose(pstate, anchor, length, embed, head, request)

    def propose(
        self, pstate, anchor, length, embed, head, request: DraftRequest | None = None
    ) -> tuple[Draft, States]:
        found, lookup = self.lookup.look_up(pstate.parts[0], anchor, length)
        long = found.matched >= LONG

        def drafted(state, anchor, length):
            given = state, anchor, length, embed, head
            proposed = self.inner.propose(*given) if request is None else self.inner.draft(*given, request)
            draft, state = drafted_by(self.inner, proposed)
            if draft.parent is not None:
                raise ValueError(_trees(self.inner))
            return draft.tokens.to(torch.int32), draft.valid.to(torch.int32), state

        def spared(state, anchor, length):
            none = torch.zeros(len(anchor), self.width - 1, dtype=torch.int32, device=anchor.device)
            return none, torch.zeros_like(none[:, 0]), self.inner.idle(state, anchor, length, embed, head)

        tokens, valid, inner = branch(long.all(), spared, drafted, pstate.parts[1], anchor, length)
        tokens = torch.where(long[:, None], found.tokens[:, : self.width - 1], tokens)
        valid = torch.where(long, self.most - 1, valid)
        return Draft(tokens, valid.to(torch.int32)), States((lookup, inner))


class Union(Composed):
    """Prompt lookup and a drafter: pass ``td.Union(td.NGramProposer(), drafter)`` as ``drafter``.

    With ``rows`` a round verifies one tree of the best nodes of all proposers, by one score: a drafter's node
    scores the log-probability of its path, lookup's a table's value for the length of the match. Without
    ``rows`` drafts are chains as wide as the drafter's: lookup's for a match of two tokens or more, else the
    drafter's.

    Args:
        proposers: an `NGramProposer`, then a `DFlashDraftModel` or another proposer; all take in all text.
            Lookup's ``width`` is the most tokens it drafts, the anchor included. With ``rows`` further
            proposers without weights and with a ``key`` may stand before the last.
        rows: of the verify pass, the anchor included, from 2 to 64; None: drafts are chains.

    Raises:
        TypeError: other objects, or another order.
        ValueError: ``rows`` is out of range, or missing with a proposer that drafts trees.
    """

    def __init__(self, *proposers: Any, rows: int | None = None):
        if len(proposers) < 2:
            raise TypeError(f"td.Union of {len(proposers)}: pass td.NGramProposer() first, then the drafter.")
        *others, drafter = proposers
        if drafter is None or isinstance(drafter, Composed):
            given = None if drafter is None else type(drafter).__name__
            raise TypeError(f"drafter={given}: pass a drafter of td.load_drafter, or a proposer, last.")
        if rows is not None:
            check_tree_rows(rows)
            for one in others:
                _check_part(one)
            return super().__init__(drafter, BestNodes, tuple(others), rows)
        lookup = others[0]
        if len(others) > 1 or not isinstance(lookup, NGramProposer):
            names = ", ".join(type(one).__name__ for one in others)
            fix = "pass one td.NGramProposer() there, or rows=... for a tree of all proposers' drafts"
            raise TypeError(f"{names} before the drafter: {fix}.")
        if getattr(drafter, "depth", None) is not None:
            raise ValueError(_trees(drafter))
        super().__init__(drafter, UnionProposer, (lookup,), None)


def _trees(drafter: Any) -> str:
    return (
        f"td.Union: {type(drafter).__name__} drafts trees, and a union without rows verifies chains; pass "
        "rows=... (the rows of a verify pass, such as 16)."
    )


def _check_part(proposer: Any) -> None:
    name = type(proposer).__name__
    if not isinstance(proposer, Proposer):
        raise TypeError(f"{name} before the drafter: pass td.NGramProposer() there, the drafter last.")
    problems = {
        "it holds tensors": holds_tensors(proposer),
        "it has taps": bool(proposer.taps),
        "it has no key, a hashable value that says what it is": getattr(proposer, "key", None) is None,
    }
    for problem in (name for name, holds in problems.items() if holds):
        raise TypeError(f"{name} before the drafter: {problem}; pass it last.")
