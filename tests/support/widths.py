"""Rounds whose widths a test prescribes."""

from dataclasses import replace
from itertools import cycle

from torch_dflash.engine.engine import Engine
from torch_dflash.engine.width import Pace, Widths
from torch_dflash.runtime import Rounds


class Mixed(Widths):  # rounds of the widths ``order``, one a chunk, over and over; ``used`` so far
    def __init__(self, widths: tuple[int, ...], order: tuple[int, ...]):
        super().__init__(widths, 1)
        self.used: list[int] = []
        self._order = cycle(order)

    def next(self, pace: Pace) -> Rounds:
        self.used.append(next(self._order))
        return Rounds(self.used[-1], 1)


def mix(engine: Engine, order: tuple[int, ...]) -> Mixed:
    """Makes ``engine``, of ``verify_width="auto"``, take these widths in turn."""
    mixed = Mixed(engine._widths.widths, order)
    engine._built = replace(engine._built, widths=mixed)
    return mixed
