"""A value as something that can be compared: descriptions are equal where the values act alike."""

from __future__ import annotations

import types
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_dflash.target.origins import Same, is_authors

PLAIN = (int, float, complex, bool, str, bytes, type(None))
_COLLECTIONS = (list, tuple, set, frozenset, deque)
_SPACES = (types.SimpleNamespace, Namespace)
MOST = 200_000
"""Parts of one value that are looked at: as many as a table over a vocabulary has."""
_DEEP = 16


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a word, None, or a collection of those, not too deep and not too large."""
    left = [value]
    for _ in range(_DEEP):
        inner = [one for one in left if type(one) not in PLAIN]
        if not inner:
            return True
        if any(type(one) is not dict and type(one) not in _COLLECTIONS for one in inner):
            return False
        parts = (chain(one, one.values()) if type(one) is dict else one for one in inner)
        left = list(islice(chain.from_iterable(parts), MOST))
        if len(left) == MOST:
            return False
    return False


def describe(value: Any, opaque: Callable[[Any], Hashable] = Same) -> Hashable:
    """What ``value`` holds, part by part.

    Followed are collections, functions (their code, defaults and cells), partials, bound methods and objects
    of somebody's own classes. Of all else, and behind `MOST` parts, stands what ``opaque`` makes of it.
    Nothing of the value runs.
    """
    return _Walk(opaque).describe(value)


class _Walk:
    def __init__(self, opaque: Callable[[Any], Hashable]):
        self._opaque, self._left = opaque, MOST
        self._open: set[int] = set()

    def describe(self, value: Any, depth: int = 0) -> Hashable:
        kind = type(value)
        self._left -= 1
        if kind in PLAIN:
            return kind, float.__repr__(value) if kind is float else value  # NaN is NaN, 1 is not True
        if kind is types.CodeType:
            return value
        if issubclass(kind, np.generic) or kind is np.ndarray and 0 < value.nbytes < MOST:
            return (
                kind,
                str(value.dtype),
                value.shape,
                value.tobytes() if value.dtype != object else Same(value),
            )
        if issubclass(kind, type | Enum) or _is_builtin(value):
            return Same(value)
        if id(value) in self._open:
            return "again"
        parts = _parts(value)
        if parts is None or depth > _DEEP or self._left < len(parts):
            return self._opaque(value)
        self._open.add(id(value))
        found = [self.describe(part, depth + 1) for part in parts]
        self._open.discard(id(value))
        # Of a class that was written anew, as a notebook's cell is run again, the methods may differ.
        return Same(kind), frozenset(found) if issubclass(kind, set | frozenset) else tuple(found)


def _is_builtin(value: Any) -> bool:
    """Whether a value is a function written in C, of no object."""
    return type(value) is types.BuiltinFunctionType and type(value.__self__) in (type(None), types.ModuleType)


def _parts(value: Any) -> list[Any] | None:
    """What a value is made of; None for one that is not looked into."""
    kind = type(value)
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if kind is partial:
        return [value.func, value.args, value.keywords]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if issubclass(kind, types.ModuleType | nn.Module | torch.Tensor):
        return None
    inside = contents(value)
    if inside is None and not (kind in _SPACES or is_authors(kind)):
        return None
    own = [] if kind is dict or kind in _COLLECTIONS else sorted(state_of(value), key=_name)
    found = list(islice(chain(inside or (), own), MOST))
    return None if len(found) == MOST else found


def contents(value: Any) -> Iterable[Any] | None:
    """The entries of a collection, a dict's as pairs; a number of a kind of its own as a plain one."""
    kind = type(value)
    if issubclass(kind, dict):
        return dict.items(value)
    for collection in _COLLECTIONS:
        if issubclass(kind, collection):
            return collection.__iter__(value)
    if issubclass(kind, int):
        return [int.__index__(value)]
    for base in (float, complex, str, bytes):
        if issubclass(kind, base):
            return [base.__repr__(value)]
    return None


def state_of(value: Any) -> Iterator[tuple[str, Any]]:
    """The attributes that an object has of its own, by name, slots among them."""
    yield from list(vars_of(value).items())
    for base in type(value).__mro__:
        for name, member in vars(base).items():
            if type(member) is types.MemberDescriptorType:
                try:
                    yield name, member.__get__(value)
                except AttributeError:  # not set
                    continue


def vars_of(value: Any) -> dict[str, Any]:
    """An object's ``__dict__`` as it stands; empty without one."""
    try:
        held = object.__getattribute__(value, "__dict__")
    except Exception:  # a property of its name may raise anything
        return {}
    return held if type(held) is dict else {}


def _name(item: tuple[Any, Any]) -> str:
    return str(item[0])
