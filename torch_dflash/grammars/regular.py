"""Builds an automaton of bytes from a regular expression, with bounds on its size."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator

import numpy as np

from torch_dflash.grammars.pattern import Chars, Either, Join, Node, Repeat, read_pattern

DEAD, FIRST = 0, 1
"""The state after a byte that is not allowed, and the state before the first byte."""
MOST_EDGES = 1 << 16
"""Most edges of the nondeterministic automaton: a few MB."""
MOST_STEPS = 1 << 21
"""Most edges followed to list the sets of states: a few seconds."""


class _TooLarge(Exception):
    """A bound was reached."""


def byte_automaton(pattern: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(next states int16 [states, 256], whether a text may end in each); `DEAD` and `FIRST` come first.

    Raises:
        ValueError: the pattern is not read here, or has ``most`` states or more.
    """
    shown = f"Grammar.regex({pattern!r}, device=True)"
    try:
        tree = read_pattern(pattern)
        return _Sets(_Edges(tree)).listed(most)
    except ValueError as error:
        raise ValueError(f"{shown}: {error}; pass device=False.") from None
    except RecursionError:
        raise ValueError(f"{shown}: its groups are nested too deeply; pass device=False.") from None
    except _TooLarge:
        why = f"it has {most} states of bytes or more, or would take too long to build"
        raise ValueError(f"{shown}: {why}; pass device=False, or a simpler pattern.") from None


class _Edges:
    """A nondeterministic automaton, built from the end of a pattern to its beginning.

    Attributes:
        reads: edges of each state: (first byte, last byte, next state).
        skips: the next states of each state without a byte.
        first, last: the states before and after a text.
    """

    def __init__(self, tree: Node):
        self.reads: list[tuple[tuple[int, int, int], ...]] = []
        self.skips: list[tuple[int, ...]] = []
        self._known: dict[tuple[tuple[int, int, int], ...], int] = {}
        self._count = 0
        self.last = self._state()
        self.first = self._before(tree, self.last)

    def _state(self, reads: tuple[tuple[int, int, int], ...] = (), skips: tuple[int, ...] = ()) -> int:
        self._count += 1 + len(reads) + len(skips)
        if self._count > MOST_EDGES:
            raise _TooLarge
        self.reads.append(reads)
        self.skips.append(skips)
        return len(self.reads) - 1

    def _reading(self, reads: tuple[tuple[int, int, int], ...]) -> int:
        """The state with the edges ``reads``; parts of the pattern with equal ends share their states."""
        if reads not in self._known:
            self._known[reads] = self._state(reads)
        return self._known[reads]

    def _before(self, node: Node, after: int) -> int:
        """The state from which ``node`` leads to ``after``."""
        match node:
            case Chars(ranges):
                return self._character(ranges, after)
            case Join(parts):
                for part in reversed(parts):
                    after = self._before(part, after)
                return after
            case Either(parts):
                return self._state(skips=tuple(self._before(part, after) for part in parts))
            case Repeat(part, least, most):
                return self._repeat(part, least, most, after)

    def _character(self, ranges: tuple[tuple[int, int], ...], after: int) -> int:
        found = []
        for low, high in ranges:
            for (begin, end), *others in _written(low, high):
                to = after
                for bounds in reversed(others):
                    to = self._reading(((*bounds, to),))
                found.append((begin, end, to))
        return self._reading(tuple(found))

    def _repeat(self, part: Node, least: int, most: int | None, after: int) -> int:
        if most is None:
            again = self._state()
            self.skips[again] = (self._before(part, again), after)
            start = again
        else:
            start = after
            for _ in range(most - least):
                start = self._state(skips=(self._before(part, start), after))
        for _ in range(least):
            before = self._before(part, start)
            if before == start:  # an empty part
                break
            start = before
        return start


class _Sets:
    """The deterministic automaton: each of its states is a set of states of `_Edges`."""

    def __init__(self, edges: _Edges):
        self._edges = edges
        self._steps = 0

    def listed(self, most: int) -> tuple[np.ndarray, np.ndarray]:
        """The result of `byte_automaton`; raises `_TooLarge` for ``most`` states, or too many steps."""
        numbers: dict[tuple[int, ...], int] = {}
        waiting: list[tuple[int, ...]] = []
        known: dict[frozenset[int], int] = {}

        def number(states: frozenset[int]) -> int:
            if states not in known:
                found = self._with_skips(states)
                if found not in numbers:
                    numbers[found] = len(numbers) + 1
                    waiting.append(found)
                known[states] = numbers[found]
            return known[states]

        number(frozenset([self._edges.first]))
        rows = [np.zeros(256, np.int16)]
        for found in waiting:  # the loop appends to it
            row = np.zeros(256, np.int16)
            for low, high, states in self._after(found):
                row[low:high] = number(states)
            rows.append(row)
            if len(numbers) >= most:
                raise _TooLarge
        ends = [self._edges.last in found for found in waiting]
        return np.stack(rows), np.array([False, *ends])

    def _with_skips(self, states: frozenset[int]) -> tuple[int, ...]:
        """The states that read a byte or end a text, among ``states`` and those that their skips reach."""
        seen, waiting = set(states), list(states)
        for state in waiting:  # the loop appends to it
            more = [one for one in self._edges.skips[state] if one not in seen]
            seen.update(more)
            waiting += more
        self._count(len(waiting))
        return tuple(sorted(one for one in seen if self._edges.reads[one] or one == self._edges.last))

    def _after(self, found: tuple[int, ...]) -> Iterator[tuple[int, int, frozenset[int]]]:
        """Yield (first byte, last byte + 1, next states) for each range of bytes with equal next states."""
        edges = [edge for state in found for edge in self._edges.reads[state]]
        bounds = sorted({bound for low, high, _ in edges for bound in (low, high + 1)})
        lead: list[set[int]] = [set() for _ in bounds]
        for low, high, to in edges:
            between = range(bisect_left(bounds, low), bisect_left(bounds, high + 1))
            self._count(1 + len(between))
            for at in between:
                lead[at].add(to)
        for at, states in enumerate(lead):
            if states:
                yield bounds[at], bounds[at + 1], frozenset(states)

    def _count(self, steps: int) -> None:
        self._steps += steps
        if self._steps > MOST_STEPS:
            raise _TooLarge


def _written(low: int, high: int) -> Iterator[list[tuple[int, int]]]:
    """Yield the characters from ``low`` to ``high`` as ranges of UTF-8: bounds of each byte in order."""
    for last in (0x7F, 0x7FF, 0xFFFF):
        if low <= last < high:
            yield from _written(low, last)
            low = last + 1
    for bits in (6, 12, 18):
        rest = (1 << bits) - 1
        if low >> bits != high >> bits and low > 0x7F:
            if low & rest:
                yield from _written(low, low | rest)
                yield from _written((low | rest) + 1, high)
                return
            if high & rest != rest:
                yield from _written(low, (high & ~rest) - 1)
                yield from _written(high & ~rest, high)
                return
    yield list(zip(chr(low).encode(), chr(high).encode(), strict=True))
