"""Compares the conventions that were tried, by statistics of their blocks, and gives the evidence."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch_dflash.doctor.changes import Change
from torch_dflash.doctor.judge import Drafted, standard_error, standard_score

SURE = 3.5
"""Standard errors that a change has to gain: hundreds are tried."""
GAIN = 0.02
"""Nats a block that a change has to gain: another dtype shifts all blocks by a hundredth."""
FAINT = 0.25
"""Nats a block that a change has to gain if the drafter stays weak: gains by chance are larger then."""
WEAK = 2.0
"""The acceptance length below which a pair without a fault is weak: one draft a pass is accepted."""
ENOUGH = 256
"""Blocks that suffice for a verdict: the doctor was measured with that many."""
FEW = 16
"""Blocks below which there is no verdict: the standard error of fewer is too inexact."""
LUCK = 1.5
"""Standard errors by which the missing blocks, up to `ENOUGH`, may be better than those at hand."""


@dataclass(frozen=True)
class Tried:
    """A convention by its ``changes`` (none: the config's own), and the blocks that it drafts."""

    changes: tuple[Change, ...]
    drafted: Drafted

    @property
    def name(self) -> str:
        """The changes in words, for tables."""
        return " and ".join(change.name for change in self.changes) or "as it is"

    @property
    def length(self) -> float:
        """Acceptance length: mean accepted drafts of a block, plus the bonus token."""
        return 1 + float(self.drafted.accepted.double().mean())

    @cached_property
    def nats(self) -> float:
        """Mean log-likelihood of the target's tokens in a block."""
        return float(self.drafted.nats.double().mean())

    @property
    def least(self) -> float:
        """Nats per block that this convention has to gain over another."""
        return GAIN if self.length >= WEAK else FAINT

    def beats(self, other: Tried) -> bool:
        """Whether the target's tokens are surely likelier than by ``other``, and acceptance is no less."""
        new, old = self.drafted, other.drafted
        sure = standard_score(new.nats, old.nats) >= surely(len(new.accepted))
        sure = sure and self.nats - other.nats >= self.least
        return sure and standard_score(new.accepted, old.accepted) > -1

    def may_beat(self, other: Tried) -> bool:
        """Whether this may beat ``other`` on `ENOUGH` blocks, if the missing blocks are better by `LUCK`."""
        new, old = self.drafted, other.drafted
        missing = max(0.0, 1 - len(new.accepted) / ENOUGH)
        error = standard_error(new.nats, old.nats)
        gain = self.nats - other.nats + LUCK * error * missing**0.5
        sure = gain >= SURE * error * (1 - missing) ** 0.5 and gain >= self.least
        return missing > 0 and sure and standard_score(new.accepted, old.accepted) > -1 - LUCK * missing**0.5


def surely(blocks: int) -> float:
    """`SURE`, and more for fewer than `ENOUGH` blocks, whose standard error is less exact."""
    return SURE * max(1.0, ENOUGH / blocks) ** 0.25 if blocks >= FEW else float("inf")


BEYOND = 2
"""Standard errors above the measured gain of a change; the true gain is hardly larger."""


@dataclass(frozen=True)
class Evidence:
    """Evidence of a verdict; for a broken pair without `gain` and `doubts`.

    Attributes:
        blocks: number of blocks that each convention drafted; most: number that fits into the answers;
            answers: number of answers.
        gain: most nats per block that the first of ``doubts``, or without doubts any change, may gain;
            of: most nats per block that any drafter could gain.
        doubts: names of changes that `ENOUGH` blocks may show to be better, single ones first.
    """

    blocks: int
    most: int
    answers: int
    gain: float
    of: float
    doubts: tuple[str, ...]

    def __str__(self) -> str:
        return f"{_count(self.blocks, 'block')} of {_count(self.answers, 'answer')}"

    @property
    def left(self) -> str:
        """The size of a fault that may have been missed, in words."""
        return f"may gain up to {self.gain:.2f} nats a block, of {self.of:.1f}"

    @property
    def advice(self) -> str:
        """The way to `ENOUGH` blocks, in words."""
        prompts = math.ceil(ENOUGH * self.answers / self.most)
        more = f"give {prompts} prompts or more, or have longer answers" if self.most < ENOUGH else ""
        drafted = f"draft {ENOUGH} blocks or more" if self.blocks < min(self.most, ENOUGH) else ""
        return ", and ".join(filter(None, (more, drafted)))


def weigh(base: Tried, others: Sequence[Tried], most: int, answers: int) -> Evidence:
    """The evidence of the blocks of ``base`` against ``others``."""

    def up_to(one: Tried) -> float:
        return one.nats - base.nats + BEYOND * standard_error(one.drafted.nats, base.drafted.nats)

    blocks = len(base.drafted.accepted)
    doubts = [one for one in others if blocks < FEW or one.may_beat(base)]
    doubts.sort(key=lambda one: (len(one.changes), -up_to(one)))
    return Evidence(
        blocks=blocks,
        most=most,
        answers=answers,
        gain=max([0.0, *map(up_to, doubts[:1] or others)]),
        of=-base.nats,
        doubts=tuple(one.name for one in doubts),
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"
