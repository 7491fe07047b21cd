"""A convention that was tried: what it drafts, and whether it is better than another, or may be."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from torch_dflash.doctor.changes import Change
from torch_dflash.doctor.judge import Drafted, standard_error, standard_score

SURE = 3.5
"""Standard errors that a change has to gain: hundreds are tried."""
GAIN = 0.02
"""Nats a block that a change has to gain: another dtype shifts all blocks by a hundredth."""
FAINT = 0.25
"""Nats that it has to gain where the drafter stays weak: what has hardly learned is likelier by chance."""
WEAK = 2.0
"""An acceptance length below which a pair without a fault is called weak: a step in two."""
ENOUGH = 256
"""Blocks on which a pair is called sound whatever may be left: the doctor was measured with as many."""
FEW = 16
"""Blocks below which nothing is said of a pair: a standard error of fewer says little."""
LUCK = 1.5
"""Standard errors by which the blocks to come, up to `ENOUGH`, may be better than those that there are."""


@dataclass(frozen=True)
class Tried:
    """A convention by its ``changes`` (none: as the config says), and all blocks as it drafts them."""

    changes: tuple[Change, ...]
    drafted: Drafted

    @property
    def name(self) -> str:
        """For tables."""
        return " and ".join(change.name for change in self.changes) or "as it is"

    @property
    def length(self) -> float:
        """Acceptance length: accepted drafts of a block and the bonus token, in the mean."""
        return 1 + float(self.drafted.accepted.double().mean())

    @cached_property
    def nats(self) -> float:
        """What a block says of the target's tokens, in the mean."""
        return float(self.drafted.nats.double().mean())

    @property
    def least(self) -> float:
        """Nats a block that it has to gain on another."""
        return GAIN if self.length >= WEAK else FAINT

    def beats(self, other: Tried) -> bool:
        """Whether the target's tokens are likelier, and drafts no less often accepted, both beyond noise."""
        new, old = self.drafted, other.drafted
        sure = standard_score(new.nats, old.nats) >= surely(len(new.accepted))
        sure = sure and self.nats - other.nats >= self.least
        return sure and standard_score(new.accepted, old.accepted) > -1

    def may_beat(self, other: Tried) -> bool:
        """Whether it might on `ENOUGH` blocks: by `LUCK` standard errors of what the further ones bring."""
        new, old = self.drafted, other.drafted
        missing = max(0.0, 1 - len(new.accepted) / ENOUGH)
        error = standard_error(new.nats, old.nats)
        gain = self.nats - other.nats + LUCK * error * missing**0.5
        sure = gain >= SURE * error * (1 - missing) ** 0.5 and gain >= self.least
        return missing > 0 and sure and standard_score(new.accepted, old.accepted) > -1 - LUCK * missing**0.5


def surely(blocks: int) -> float:
    """`SURE`, and more on fewer than `ENOUGH` blocks: they are of less text, and their error is less sure."""
    return SURE * max(1.0, ENOUGH / blocks) ** 0.25 if blocks >= FEW else float("inf")
