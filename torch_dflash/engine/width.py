"""How many rows the next rounds verify: as many as fixed, or what gains most tokens a second here.

What a round of each width costs on this machine is measured on the rounds themselves. How often each position
of a draft is accepted is counted as the text goes on, for it changes with the text. Neither changes a token:
a round of any width commits what the target picks.
"""

from __future__ import annotations

import statistics
import threading
from collections import deque

import numpy as np

from torch_dflash.runtime import Turn

TRIAL = 4
"""Rounds of a chunk that measures what a width costs."""
PROBE_EVERY = 64
"""Rounds without a look at the whole draft, after which `PROBE` rounds look at it."""
PROBE = 2
KEPT = 9
MEMORY = 0.98
"""What a count of accepted drafts is worth a round later: half after 34 rounds."""
ASSUMED = (1.0, 2.0)
"""Accepted and tried drafts of each position before anything is seen."""


def ladder(widest: int) -> tuple[int, ...]:
    """The widths among which is chosen: 1, the powers of two below ``widest``, and ``widest``."""
    powers = (1 << step for step in range(widest.bit_length()))
    return (*(width for width in powers if width < widest), widest)


class Widths:
    """Chooses the next chunk's rounds and their width. Threads may share one.

    Args:
        widths: to choose from, ascending; with a single one nothing is measured.
        rounds: most rounds of a chunk.
    """

    def __init__(self, widths: tuple[int, ...], rounds: int):
        self.widths, self._rounds = widths, rounds
        self._seconds: dict[int, deque[float]] = {width: deque(maxlen=KEPT) for width in widths}
        self._accepted, self._tried = (np.full(widths[-1] - 1, value) for value in ASSUMED)
        self._unseen = 0
        self._lock = threading.Lock()

    def next(self) -> Turn:
        """The next chunk."""
        widest = self.widths[-1]
        if len(self.widths) == 1:
            return Turn(widest, self._rounds)
        with self._lock:
            unknown = [width for width in self.widths if not self._seconds[width]]
            if unknown:
                return Turn(unknown[-1], min(TRIAL, self._rounds))
            if self._unseen >= PROBE_EVERY:
                return Turn(widest, min(PROBE, self._rounds))
        return self.settled()

    def settled(self) -> Turn:
        """A whole chunk of the width that is best as far as is known; the widest before any is measured."""
        with self._lock:
            known = [width for width in self.widths if self._seconds[width]]
            return Turn(max(known, key=self._speed, default=self.widths[-1]), self._rounds)

    def note(self, turn: Turn, seconds: float | None, accepted: list[list[int]]) -> None:
        """Take in what a chunk has shown.

        Args:
            turn: the chunk.
            seconds: what it took, its read included; None if it took something else besides.
            accepted: of each row, the tokens that each of its rounds committed.
        """
        rounds = max(map(len, accepted), default=0)
        if len(self.widths) == 1 or not rounds:
            return
        with self._lock:
            if seconds is not None:
                self._seconds[turn.width].append(seconds / rounds)
            self._unseen = 0 if turn.width == self.widths[-1] else self._unseen + rounds
            for row in accepted:
                for count in row:
                    self._count(turn.width, count)

    def expected(self, width: int) -> float:
        """Tokens that a round of ``width`` commits, as far as is known."""
        return 1 + float(np.cumprod(self._accepted / self._tried)[: width - 1].sum())

    def _speed(self, width: int) -> float:
        return self.expected(width) / statistics.median(self._seconds[width])

    def _count(self, width: int, count: int) -> None:
        """Drafts 1 to ``count - 1`` were accepted, the next was not if there was one."""
        tried = min(count, width - 1)
        self._accepted[:tried] *= MEMORY
        self._tried[:tried] *= MEMORY
        self._accepted[: count - 1] += 1
        self._tried[:tried] += 1
