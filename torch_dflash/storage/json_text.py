"""Reads users' JSON; every fault is a ``ValueError``."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

MOST_DEPTH = 200
"""Most levels of lists and objects; Python's own limit varies with the caller's depth."""
_DEEP = f"it is nested more than {MOST_DEPTH} levels deep"


def parse_json(text: str, used: Iterable[str] | None = None) -> Any:
    """The value of a JSON text; the last value counts for a repeated name.

    Args:
        text: the user's. used: fields of an object that are read; None: every field.

    Raises:
        ValueError: no JSON; NaN, Infinity or a number too large for Python; half a surrogate pair in a used
            field; or more levels than `MOST_DEPTH`.
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
    """Turn a library's RecursionError over a JSON file of ``source`` into ``ValueError``.

    Raises:
        ValueError: the file is nested too deeply.
    """
    try:
        yield
    except RecursionError:
        raise ValueError(f"{source}: a JSON file in it is nested too deeply; fetch it again.") from None


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


_HOOKS: dict[str, Any] = {"parse_constant": _refuse, "parse_float": _number, "parse_int": _whole}


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level := [inner for one in level if isinstance(one, list | dict) for inner in _inside(one)]:
        depth += 1
        if depth >= MOST_DEPTH:
            raise ValueError(_DEEP)


def _inside(value: Any) -> Any:
    return value.values() if isinstance(value, dict) else value
