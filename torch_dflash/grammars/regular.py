"""A regular expression as an automaton of bytes: interegular's, of characters, each written in UTF-8."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from torch_dflash.grammars.vocabulary import library

DEAD, FIRST = 0, 1
"""States: behind what may not stand there; before the first byte."""
# Of each first byte: how many follow, and the bounds of the next (RFC 3629, section 4).
_LEADS = dict.fromkeys(range(128), (0, 0, 0))
_LEADS |= dict.fromkeys(range(194, 224), (1, 128, 191))
_LEADS |= dict.fromkeys(range(224, 240), (2, 128, 191)) | {
    0xE0: (2, 0xA0, 0xBF),
    0xED: (2, 0x80, 0x9F),
}
_LEADS |= dict.fromkeys(range(240, 245), (3, 128, 191)) | {
    0xF0: (3, 0x90, 0xBF),
    0xF4: (3, 0x80, 0x8F),
}


class _Place(NamedTuple):
    """In the middle of a character, or before one: ``prefix`` are its bytes so far, as long as they matter.

    Where no character that the pattern names begins so, only what must follow counts: ``left`` bytes, the
    next of them between ``low`` and ``high``, and ``state`` is the one behind the character.
    """

    state: Any
    prefix: bytes = b""
    left: int = 0
    low: int = 0
    high: int = 0


def byte_automaton(pattern: str, most: int) -> tuple[np.ndarray, np.ndarray]:
    """(next states int16 [states, 256], whether a text may end in each): `DEAD`, `FIRST` and the others.

    Raises:
        ValueError: no regular expression that interegular knows, or one of more than ``most`` states.
            ImportError: interegular is missing.
    """
    said = f"Grammar.regex({pattern!r}, device=True)"
    patterns = library("interegular.patterns")
    try:
        letters = patterns.parse_pattern(pattern).to_fsm().reduce()
    except (patterns.InvalidSyntax, patterns.Unsupported) as error:
        raise ValueError(f"{said}: interegular refuses it ({error}); pass device=False.") from None
    named = {str(one).encode() for one in letters.alphabet if isinstance(one, str)}
    begun = {text[:end] for text in named for end in range(1, len(text))}
    places = {_Place(letters.initial): FIRST}
    rows, waiting = [np.zeros(256, np.int16)], [_Place(letters.initial)]
    for place in waiting:  # which grows
        row = np.zeros(256, np.int16)
        for byte in range(256):
            to = _after(letters, begun, place, byte)
            if to is not None and to not in places:
                places[to] = len(places) + 1
                waiting.append(to)
            row[byte] = DEAD if to is None else places[to]
        rows.append(row)
        if len(places) >= most:
            raise ValueError(
                f"{said}: it has {most} states of bytes or more; pass device=False, or a simpler pattern."
            )
    ends = [not place.prefix and not place.left and place.state in letters.finals for place in waiting]
    return np.stack(rows), np.array([False, *ends])


def _after(letters: Any, begun: set[bytes], place: _Place, byte: int) -> _Place | None:
    """Where a byte leads, None if it may not stand there."""
    if place.left:
        if not place.low <= byte <= place.high:
            return None
        more = place.left > 1
        return _Place(place.state, left=place.left - 1, low=0x80, high=0xBF) if more else _Place(place.state)
    text = place.prefix + bytes([byte])
    lead = _LEADS.get(text[0])
    if lead is None:
        return None
    left, low, high = lead
    if len(text) > 1:
        if not (low if len(text) == 2 else 0x80) <= byte <= (high if len(text) == 2 else 0xBF):
            return None
        left, low, high = left - len(text) + 1, 0x80, 0xBF
    moves = letters.map.get(place.state, {})
    if left and text in begun:
        return _Place(place.state, prefix=text)
    # Beside the named characters a pattern knows "anything else" alone, whatever character that is.
    state = moves.get(letters.alphabet[text.decode()] if not left else letters.alphabet[_OTHER])
    if state is None:
        return None
    return _Place(state, left=left, low=low, high=high) if left else _Place(state)


_OTHER = "\U0010ffff"  # a noncharacter: no text has it, and no pattern names it
