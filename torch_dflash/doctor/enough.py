"""What a verdict rests on: how many blocks, and what these leave open."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from torch_dflash.doctor.judge import standard_error
from torch_dflash.doctor.tried import ENOUGH, FEW, Tried

BEYOND = 2
"""Standard errors above what a change gains here, which it will hardly gain in truth."""


@dataclass(frozen=True)
class Evidence:
    """Of a pair in which nothing was found wrong, or of one that is broken, without `gain` and `doubts`.

    Attributes:
        blocks: drafted by each convention; most: as many as the answers have room for; answers: their number.
        gain: nats a block that the first of ``doubts``, or without these any change, may gain at most, as far
            as the blocks tell; of: those that there are to gain.
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
        """How large a fault may be that was not seen, in words."""
        return f"may gain up to {self.gain:.2f} nats a block, of {self.of:.1f}"

    @property
    def advice(self) -> str:
        """How to come to `ENOUGH` blocks."""
        prompts = math.ceil(ENOUGH * self.answers / self.most)
        more = f"give {prompts} prompts or more, or have longer answers" if self.most < ENOUGH else ""
        drafted = f"draft {ENOUGH} blocks or more" if self.blocks < min(self.most, ENOUGH) else ""
        return ", and ".join(filter(None, (more, drafted)))


def weigh(base: Tried, others: Sequence[Tried], most: int, answers: int) -> Evidence:
    """What the blocks of ``base`` say, and what they leave open of ``others``."""

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


def _count(number: int, what: str) -> str:
    return f"{number} {what}{'' if number == 1 else 's'}"
