"""Whether a drafter learned from answers with thinking or without: the chat template as a convention."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_dflash.doctor.changes import Change
from torch_dflash.doctor.diagnosis import Diagnosis
from torch_dflash.doctor.tried import SURE, WEAK, Tried
from torch_dflash.proposers.notes import Finding

VARIABLES = ("enable_thinking", "thinking")
"""What chat templates call it."""
LONGER = 1.5
"""Times the acceptance length that the other answers must come to: they are other texts, easier or harder."""


def other_way(ask: Callable[[dict[str, Any]], Any], options: dict[str, Any]) -> dict[str, Any]:
    """The variable of `VARIABLES`, with a value at which ``ask(options)`` makes other prompts; or {}.

    A value that the template refuses is none.
    """
    asked = ask(options)
    for name in VARIABLES:
        for value in (False, True):
            with suppress(ValueError):
                if ask(options | {name: value}) != asked:
                    return {name: value}
    return {}


def with_other_way(here: Diagnosis, there: Diagnosis, other: dict[str, Any]) -> Diagnosis:
    """``here``, or what ``there`` found on answers asked for with ``other``, where these are drafted better.

    Both are judged by all conventions, so a template and a field may be wrong at once.
    """
    ((name, value),) = other.items()
    mine, best = _chosen(here), _chosen(there)
    if best.length < max(WEAK, LONGER * mine.length) or not _surely_longer(best, mine):
        words = f"answers with {name}={value} come to {there.length:.2f}; ask as in training."
        note = Finding("acceptance length", f"{here.length:.2f}", words)
        return replace(here, findings=[*here.findings, note])
    change = Change(
        kind="template",
        name=f"{name}={value}",
        words=f"the drafter drafts answers with {name}={value} at {best.length:.2f} tokens a pass, and these "
        f"at {mine.length:.2f}: it was trained on such",
        fix=f"ask with {name}={value}, or train the drafter on answers like these.",
        apply=lambda now: now,
    )
    tried = [Tried((change, *one.changes), one.drafted) for one in there.tried]
    return replace(
        here,
        verdict="broken",
        changes=(change, *there.changes),
        better=there.better,
        tried=sorted([*here.tried, *tried], key=lambda one: -one.nats),
    )


def _chosen(found: Diagnosis) -> Tried:
    return next(one for one in found.tried if one.changes == found.changes)


def _surely_longer(one: Tried, other: Tried) -> bool:
    """By Welch's standard error: the blocks of the two are of different texts."""

    def error(accepted: Tensor) -> float:
        return float(accepted.double().var() / max(1, len(accepted))) if len(accepted) > 1 else float("inf")

    noise = (error(one.drafted.accepted) + error(other.drafted.accepted)) ** 0.5
    return one.length - other.length >= SURE * noise and one.length > other.length
