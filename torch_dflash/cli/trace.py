"""Show rounds token by token: what was drafted, what was accepted, what the target said instead."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any

import torch

from torch_dflash.engine import Engine

GREEN, RED, BOLD, RESET = "\033[32m", "\033[31;9m", "\033[1m", "\033[0m"


@dataclass(frozen=True)
class Round:
    """One round of one row: the ``drafted`` ids, how many were ``accepted``, the ids ``committed``."""

    drafted: list[int]
    accepted: int
    committed: list[int]


def trace_rounds(engine: Engine, input_ids: torch.Tensor, **options) -> list[Round]:
    """Generate with an eager one-row engine and note every draft.

    Drafts are no output of a round (rejected ones are gone when it ends), so the proposer is watched.
    """
    proposer: Any = engine.pair.proposer
    drafts: list[list[int]] = []
    propose = proposer.propose

    def watched(*args):
        draft, state = propose(*args)
        drafts.append(draft.tokens[0, : int(draft.valid[0])].tolist())
        return draft, state

    proposer.propose = watched
    try:
        pieces = list(engine.stream(input_ids, **options))[1:]  # the first is prefill's token
    finally:
        del proposer.propose
    verified = engine.plan.verify_width - 1
    rounds = []
    for draft, (committed,) in zip(drafts, pieces, strict=True):
        same = [a == b for a, b in zip(draft[:verified], committed, strict=False)]
        accepted = same.index(False) if False in same else len(same)
        rounds.append(Round(draft, accepted, committed))
    return rounds


def show(rounds: list[Round], tokenizer, colour: bool) -> str:
    """One line a round: accepted drafts, the bonus token, then the drafts that were rejected."""
    lines = []
    for number, item in enumerate(rounds, 1):
        accepted = _words(tokenizer, item.committed[: item.accepted])
        bonus = _words(tokenizer, item.committed[item.accepted :])
        rejected = _words(tokenizer, item.drafted[item.accepted :])
        if colour:
            accepted, bonus = f"{GREEN}{accepted}{RESET}", f"{BOLD}{bonus}{RESET}"
            rejected = f"{RED}{rejected}{RESET}" if rejected else ""
        lines.append(
            f"  round {number:>2}  accepted {item.accepted} of {len(item.drafted)}: {accepted or '-'}  "
            f"bonus: {bonus or '-'}  rejected: {rejected or '-'}"
        )
    return "\n".join(lines)


def _words(tokenizer, ids: list[int]) -> str:
    runs = ((token, len(list(run))) for token, run in itertools.groupby(ids))
    return "|".join(
        repr(tokenizer.decode([token]))[1:-1] + (f" x{times}" if times > 1 else "") for token, times in runs
    )
