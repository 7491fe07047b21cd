"""Reads a regular expression, in the part of Rust's syntax that is the same in every dialect."""

from __future__ import annotations

import re
import string
from typing import NamedTuple

_LAST = 0x10FFFF
_CHARACTERS = ((0, 0xD7FF), (0xE000, _LAST))
"""All characters that a text can have: no surrogates."""
_CONTROLS = {"a": 7, "t": 9, "n": 10, "v": 11, "f": 12, "r": 13}
_NUMBERED = re.compile(r"x([0-9a-fA-F]{2})|u([0-9a-fA-F]{4})|U([0-9a-fA-F]{8})|[xuU]\{([0-9a-fA-F]{1,8})\}")
# Of the flags only i and s can be on, so switching the others off changes nothing.
_GROUP = re.compile(r"\(\?(?:P?<[A-Za-z_][A-Za-z0-9_]*>|([is]*)(?:-([imsxU]+))?([:)]))")
_OTHER_GROUP = re.compile(r"\(\?(?:[A-Za-z-]*[:)]|P?<[=!]|P?<[^>]*>|P?.)?", re.DOTALL)
_REPEAT = re.compile(r"([*+?]|\{(\d+)(?:(,)(\d*))?\})\??")
_OPERATORS = ("[", "&&", "--", "~~")
# Further characters that these letters match in any case: LONG S and KELVIN SIGN.
_FOLDED = {"s": "\u017f", "S": "\u017f", "k": "\u212a", "K": "\u212a"}
_MOST_FOLDED = 1000


class Chars(NamedTuple):
    """One character of ``ranges``, which are sorted and do not touch."""

    ranges: tuple[tuple[int, int], ...]


class Join(NamedTuple):
    """The parts in order."""

    parts: tuple[Node, ...]


class Either(NamedTuple):
    """One of the parts."""

    parts: tuple[Node, ...]


class Repeat(NamedTuple):
    """A part, ``least`` to ``most`` times; ``most`` None: no limit."""

    part: Node
    least: int
    most: int | None


Node = Chars | Join | Either | Repeat


class Unread(ValueError):
    """A part of the pattern that this reader does not know; the message names the part and its place."""


def read_pattern(text: str) -> Node:
    """The tree of a pattern.

    Raises:
        Unread: not a regular expression, or a part that dialects read differently.
        RecursionError: groups are nested too deeply.
    """
    reader = _Reader(text)
    found = reader.choice(frozenset())
    if reader.at < len(text):
        raise Unread(f"')' at character {reader.at + 1} closes nothing")
    return found


class _Reader:
    def __init__(self, text: str):
        self.text, self.at = text, 0

    def unread(self, start: int, hint: str = "") -> Unread:
        """The error for the text from ``start`` to the current place."""
        what = self.text[start : self.at]
        return Unread(f"{what!r} at character {start + 1} is not read here{hint}")

    def open(self, start: int) -> Unread:
        return Unread(f"{self.text[start]!r} at character {start + 1} is never closed")

    def take(self, what: str) -> bool:
        found = self.text.startswith(what, self.at)
        self.at += len(what) * found
        return found

    def match(self, kind: re.Pattern[str]) -> re.Match[str] | None:
        found = kind.match(self.text, self.at)
        self.at = self.at if found is None else found.end()
        return found

    def next(self) -> str:
        """The next character; "" at the end."""
        self.at += 1
        return self.text[self.at - 1 : self.at]

    def choice(self, flags: frozenset[str]) -> Node:
        """Alternatives, up to the end of their group."""
        options: list[Node] = []
        parts: list[Node] = []
        while self.at < len(self.text) and self.text[self.at] != ")":
            if self.take("|"):
                options.append(Join(tuple(parts)))
                parts = []
                continue
            start, group = self.at, self.match(_GROUP)
            within = (flags | {*(group[1] or "")}) - {*(group[2] or "")} if group else flags
            if group and group[3] == ")":
                flags = within  # they hold up to the end of this group
                continue
            if not group and self.match(_OTHER_GROUP):
                raise self.unread(start)
            if group or self.take("("):
                part = self.choice(within)
                if not self.take(")"):
                    raise self.open(start)
            else:
                part = self.character(flags)
            while repeat := self.match(_REPEAT):
                part = _repeated(part, repeat)
            parts.append(part)
        options.append(Join(tuple(parts)))
        return options[0] if len(options) == 1 else Either(tuple(options))

    def character(self, flags: frozenset[str]) -> Chars:
        start, first = self.at, self.next()
        if first == "[":
            return self.set(flags)
        if first == ".":
            return Chars(_CHARACTERS if "s" in flags else _others([(10, 10)]))
        if first in "^$":
            raise self.unread(start, ": a pattern matches an answer as a whole, so leave it out")
        if first in "*+?{":
            raise self.unread(start)
        code = self.escape() if first == "\\" else ord(first)
        return Chars(_sorted(self.in_any_case([(code, code)], flags, start)))

    def escape(self) -> int:
        """The character of an escape whose backslash was read."""
        start = self.at - 1
        if found := self.match(_NUMBERED):
            code = int(next(filter(None, found.groups())), 16)
            if not any(low <= code <= high for low, high in _CHARACTERS):
                raise self.unread(start)
            return code
        letter = self.next()
        if not letter:
            raise Unread(f"the backslash at character {start + 1} has nothing behind it")
        if letter in _CONTROLS:
            return _CONTROLS[letter]
        if letter in "dDwWsSpP":
            hint = ": libraries read it differently, so write out what it stands for ([0-9] for a digit)"
            raise self.unread(start, hint)
        if letter not in string.punctuation + " " or letter in "<>":
            raise self.unread(start)
        return ord(letter)

    def set(self, flags: frozenset[str]) -> Chars:
        """A class of characters whose opening bracket was read."""
        begin = self.at - 1
        without, found = self.take("^"), []
        while not found or not self.take("]"):
            start = self.at
            if any(map(self.take, _OPERATORS)):
                raise self.unread(start, " within a class: write \\ before it")
            low = high = self.member(begin)
            if self.text.startswith("-", self.at) and self.text[self.at + 1 : self.at + 2] not in ("]", "-"):
                self.at += 1
                high = self.member(begin)
            if low > high:
                raise self.unread(start)
            found.append((low, high))
        found = self.in_any_case(found, flags, begin)
        return Chars(_others(found) if without else _sorted(found))

    def member(self, begin: int) -> int:
        """The next character of the class that begins at ``begin``."""
        letter = self.next()
        if not letter:
            raise self.open(begin)
        return self.escape() if letter == "\\" else ord(letter)

    def in_any_case(
        self, ranges: list[tuple[int, int]], flags: frozenset[str], start: int
    ) -> list[tuple[int, int]]:
        """``ranges``, and with the flag i their characters in the other case; ``start`` is for messages."""
        if "i" not in flags:
            return ranges
        if sum(high - low for low, high in ranges) > _MOST_FOLDED:
            raise self.unread(start, ": a class of many characters with the flag i")
        letters = {chr(code) for low, high in ranges for code in range(low, high + 1)}
        others = {case(letter) for letter in letters for case in (str.lower, str.upper)}
        others |= {_FOLDED[letter] for letter in letters if letter in _FOLDED}
        return ranges + [(ord(one), ord(one)) for one in others if len(one) == 1]


def _repeated(part: Node, repeat: re.Match[str]) -> Node:
    kind, least, comma, most = repeat.groups()
    if kind in "*+?":
        return Repeat(part, int(kind == "+"), 1 if kind == "?" else None)
    return Repeat(part, int(least), int(least) if not comma else int(most) if most else None)


def _sorted(ranges: list[tuple[int, int]]) -> tuple[tuple[int, int], ...]:
    """The characters of ``ranges``, in sorted ranges that do not touch."""
    return _others(_others(ranges))


def _others(ranges: list[tuple[int, int]] | tuple[tuple[int, int], ...]) -> tuple[tuple[int, int], ...]:
    """The characters in none of ``ranges``, in sorted ranges that do not touch."""
    found, begin = [], 0
    for low, high in sorted([*ranges, (0xD800, 0xDFFF), (_LAST + 1, _LAST + 1)]):
        if begin < low:
            found.append((begin, low - 1))
        begin = max(begin, high + 1)
    return tuple(found)
