"""Reads JSON that a user wrote; whatever is wrong with it is a ``ValueError``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_DEPTH = 200
"""Lists and objects within each other. Python itself gives up at a depth that varies with the caller's."""
_DEEP = f"it is nested more than {MOST_DEPTH} levels deep"


def parse_json(text: str, used: Iterable[str] | None = None) -> Any:
    """The value of a JSON text; of a name that an object has twice, the last value counts.

    Args:
        text: what a user wrote.
        used: the fields of an object that are read at all; None: every field.

    Raises:
        ValueError: no JSON; NaN, Infinity or a number that Python does not hold; half a surrogate pair, which
            is no character, in what is used; or deeper than `MOST_DEPTH`.
    """
    try:
        found = json.loads(text, **_HOOKS)
        if text.count("[") + text.count("{") > MOST_DEPTH:
            _check_depth(found)
        if "\\u" in text or not text.isascii():
            read = found
            if used is not None and isinstance(found, dict):
                read = {name: found[name] for name in used if name in found}
            json.dumps(read, ensure_ascii=False).encode()
    except RecursionError:
        raise ValueError(_DEEP) from None
    except UnicodeEncodeError as error:
        half = ascii(error.object[error.start])
        raise ValueError(f"{half} is half a surrogate pair, which is no character") from None
    return found


@contextmanager
def naming_deep_json(source: Any) -> Iterator[None]:
    """Rounds what another library raises over a JSON file of ``source`` that is nested too deeply.

    Raises:
        ValueError: in place of RecursionError.
    """
    try:
        yield
    except RecursionError:
        raise ValueError(
            f"{source}: a JSON file of it is nested too deeply to be read; fetch it again."
        ) from None


def _refuse(word: str) -> Any:
    raise ValueError(f"{word} is no JSON: write a number or null")


def _number(text: str) -> float:
    found = float(text)
    if math.isinf(found):
        raise ValueError(f"{text} is beyond the largest float")
    return found


def _whole(text: str) -> int:
    try:
        return int(text)
    except ValueError:  # Python has a limit
        raise ValueError(f"a number of {len(text)} digits is too long") from None


_HOOKS: dict[str, Any] = {
    "parse_constant": _refuse,
    "parse_float": _number,
    "parse_int": _whole,
}


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [inner for one in level if isinstance(one, list | dict) for inner in _inside(one)]:
        depth += 1
        if depth >= MOST_DEPTH:
            raise ValueError(_DEEP)


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value
