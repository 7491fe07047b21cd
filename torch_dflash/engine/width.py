"""Chooses the number of rows that rounds verify: a fixed number, or the one with the highest throughput.

What a round of each width costs on this machine is measured on the rounds themselves. How often each position
of a draft is accepted is counted as the text goes on, for it changes with the text. Neither changes a token:
a round of any width commits what the target picks.

Drafting is a bet: a round that accepts nothing takes longer than a plain step. So each generation keeps an
account of what it gained over plain decoding, and bets only what that and a small allowance can lose. Apart
from that, each width has a round now and then to show what it costs by now.
"""

from __future__ import annotations

import math
import statistics
import threading
from collections import deque
from dataclasses import dataclass
from functools import partial

import numpy as np

from torch_dflash.plan import DecodePlan
from torch_dflash.requests.options import EngineOptions
from torch_dflash.runtime import Rounds

PLAIN = 1
"""The width of a round without a draft."""
ALLOWANCE, SHARE = 0.6, 0.005
"""The loss that a generation may risk: so many plain rounds, and this part of its tokens' time."""
LOOK_EVERY, LOOK = 64, 2
"""Rounds of a generation between two looks at as much of the draft as it can afford, and rounds of a look."""
TRIALS, TRIAL = 2, 2
"""Chunks that measure what a width costs, and rounds of each."""
UNKNOWN = 1.5
"""Plain rounds that a round of a width takes for as long as nothing is measured."""
UNLIMITED = 1e9
"""A lead that no bet can lose."""
KEPT = 9
STALE_PLAIN, STALE = 128, 512
"""Rounds, of all generations, after which a round of width 1, or of another, shows its cost anew, if it fell.

A machine is not always equally fast, and what a bet is worth is told by both costs.
"""
MEMORY = 0.98
"""Decay of a count of accepted drafts per round: half after 34 rounds."""
ASSUMED = (1.0, 2.0)
"""Accepted and tried drafts of each position before anything is seen."""


def ladder(widest: int) -> tuple[int, ...]:
    """The widths among which is chosen: 1, the powers of two from 4 on below ``widest``, and ``widest``.

    A round of two rows drafts as long as one of four, and costs hardly less.
    """
    powers = (1 << step for step in (0, *range(2, widest.bit_length())))
    return (*(width for width in powers if width < widest), widest)


@dataclass
class Pace:
    """One generation held against plain decoding, in rounds of width 1, which commit a token each."""

    ahead: float = 0.0
    tokens: float = 0.0
    since_look: int = LOOK_EVERY

    @property
    def allowed_loss(self) -> float:
        """The loss that the next chunk may risk."""
        return ALLOWANCE + SHARE * self.tokens + self.ahead


class Widths:
    """Chooses the next chunk's rounds and their width. Threads may share one, each generation has its `Pace`.

    Args:
        widths: to choose from, ascending; with a single one nothing is measured.
        rounds: most rounds of a chunk.
    """

    def __init__(self, widths: tuple[int, ...], rounds: int):
        self.widths, self._rounds = widths, rounds
        self._seconds: dict[int, deque[float]] = {width: deque(maxlen=KEPT) for width in widths}
        self._untimed = dict.fromkeys(widths, 0)  # rounds since one of a width was timed
        self._lock = threading.Lock()
        self.forget_text()

    @property
    def measured(self) -> bool:
        """Whether the cost of every width is known."""
        return len(self.widths) == 1 or not any(map(self._unknown, self.widths))

    def forget_text(self) -> None:
        """Drop what is known of drafts, and keep what rounds cost."""
        with self._lock:
            self._accepted, self._tried = (np.full(self.widths[-1] - 1, value) for value in ASSUMED)

    def next(self, pace: Pace) -> Rounds:
        """The next chunk of a generation."""
        if len(self.widths) == 1:
            return Rounds(self.widths[0], self._rounds)
        with self._lock:
            return self._next(pace)

    def settled(self) -> Rounds:
        """A whole chunk of the width that is best as far as is known; the widest before any is measured."""
        with self._lock:
            known = [width for width in self.widths if self._seconds[width]]
            return Rounds(max(known, key=self._speed, default=self.widths[-1]), self._rounds)

    def note(self, turn: Rounds, seconds: float | None, accepted: list[list[int]], pace: Pace) -> None:
        """Take in what a chunk has shown.

        Args:
            turn: the chunk.
            seconds: what it took, its read included; None if it took something else besides.
            accepted: of each row, the tokens that each of its rounds committed.
            pace: of the generation that the chunk belongs to.
        """
        rounds, tokens = max(map(len, accepted), default=0), sum(map(sum, accepted))
        if len(self.widths) == 1 or not rounds:
            return
        with self._lock:
            self._time(turn.width, rounds, seconds)
            for row in accepted:
                for count in row:
                    self._count(turn.width, count)
            committed = rounds * tokens / sum(map(len, accepted))
            pace.ahead += committed - self._paid(turn.width, rounds, seconds)
            pace.tokens += committed
            pace.since_look = 0 if turn.width == self.widths[-1] else pace.since_look + rounds

    def expected(self, width: int) -> float:
        """Tokens that a round of ``width`` commits, as far as is known."""
        return 1 + float(np.cumprod(self._accepted / self._tried)[: width - 1].sum())

    def _next(self, pace: Pace) -> Rounds:
        if self._unknown(PLAIN):
            return Rounds(PLAIN, min(TRIAL, self._rounds))
        stale = [width for width in self.widths if self._is_stale(width)]
        if stale:
            return Rounds(stale[0], 1)
        affordable = [width for width in self.widths if self._cost(width) - 1 <= pace.allowed_loss]
        unknown = [width for width in affordable if self._unknown(width)]
        if unknown:
            width, rounds = unknown[0], TRIAL
        elif pace.since_look >= LOOK_EVERY and affordable[-1:] > [PLAIN]:
            width, rounds = affordable[-1], LOOK
            pace.since_look = 0
        else:
            width, rounds = max(affordable, key=self._speed, default=PLAIN), self._rounds
        lost = self._cost(width) - 1  # a round, if nothing is accepted
        most = int(pace.allowed_loss / lost) if lost > 0 and width != PLAIN else rounds
        return Rounds(width, min(rounds, most, self._rounds))

    def _time(self, width: int, rounds: int, seconds: float | None) -> None:
        """Take in what ``rounds`` of ``width`` took, if it is known.

        Of stale costs one is kept beside the new one, which may be a hiccup: the lower counts.
        """
        stale, known = self._is_stale(width), self._seconds[width]
        for each in self.widths:
            self._untimed[each] += rounds
        if seconds is None:
            return
        if stale and known:
            shortest = self._shortest(width)
            known.clear()
            known.append(shortest)
        known.append(seconds / rounds)
        self._untimed[width] = 0

    def _is_stale(self, width: int) -> bool:
        return self._untimed[width] >= (STALE_PLAIN if width == PLAIN else STALE)

    def _unknown(self, width: int) -> bool:
        return len(self._seconds[width]) < TRIALS

    def _paid(self, width: int, rounds: int, seconds: float | None) -> float:
        """The time of ``rounds`` in rounds of width 1: above their cost where many of a width are slow.

        Here a round of width 1 is the median one: what slows all rounds alike is no loss. Of a chunk in which
        something else ran no more than `ALLOWANCE` is charged above its cost.
        """
        cost = rounds * self._cost(width)
        if width == PLAIN or seconds is None or not self._seconds[PLAIN]:
            return cost
        return min(seconds / statistics.median_low(self._seconds[PLAIN]), cost + ALLOWANCE)

    def _cost(self, width: int) -> float:
        """The time of a round, in rounds of width 1."""
        if not (self._seconds[width] and self._seconds[PLAIN]):
            return 1.0 if width == PLAIN else UNKNOWN
        return self._shortest(width) / self._shortest(PLAIN)

    def _shortest(self, width: int) -> float:
        """Seconds of a round, the least of the last: whatever else runs makes rounds longer, never shorter.

        Two widths are not timed at the same moment, and a slow one would tell on one of them.
        """
        return min(self._seconds[width])

    def _speed(self, width: int) -> float:
        return self.expected(width) / self._shortest(width)

    def _count(self, width: int, count: int) -> None:
        """Drafts 1 to ``count - 1`` were accepted, the next was not if there was one."""
        tried = min(count, width - 1)
        self._accepted[:tried] *= MEMORY
        self._tried[:tried] *= MEMORY
        self._accepted[: count - 1] += 1
        self._tried[:tried] += 1


class TreeWidths(Widths):
    """`Widths` of rounds that verify trees, of which a narrower one is no part of a wider one.

    What a round gains is taken to grow with the logarithm of its rows, so that rounds of each width tell of
    all: drafts accepted per doubling of the rows are counted.

    Args:
        most: tokens that a round gains at most. The others are those of `Widths`.
    """

    def __init__(self, widths: tuple[int, ...], rounds: int, most: int):
        self._most = most
        super().__init__(widths, rounds)

    def forget_text(self) -> None:
        with self._lock:
            self._drafts, self._doublings = ASSUMED

    def expected(self, width: int) -> float:
        return min(1 + self._drafts / self._doublings * math.log2(width), self._most)

    def _count(self, width: int, count: int) -> None:
        if width > 1:
            self._drafts = self._drafts * MEMORY + count - 1
            self._doublings = self._doublings * MEMORY + math.log2(width)


def widths_of(options: EngineOptions, plan: DecodePlan) -> Widths:
    """The widths that the rounds of ``plan`` may have."""
    if options.verify_width != "auto":
        return Widths((plan.verify_width,), plan.rounds_per_chunk)
    kind = Widths if plan.depth is None else partial(TreeWidths, most=plan.gain)
    return kind(ladder(plan.verify_width), plan.rounds_per_chunk)
