"""A value as something that can be compared: descriptions are equal where the values act alike."""

from __future__ import annotations

import types
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
_COLLECTIONS = (list, tuple, set, frozenset)
_MOST = 10_000  # parts of one value that are looked at
_DEEP = 16


def is_plain(value: Any, depth: int = 0) -> bool:
    """Whether a value is a number, a word, None, or a collection of those that ends."""
    kind = type(value)
    if kind is dict:
        value = chain(value, value.values())
    elif kind not in _COLLECTIONS:
        return kind in PLAIN
    return depth < _DEEP and all(is_plain(one, depth + 1) for one in value)


def describe(value: Any, opaque: Callable[[Any], Hashable] = Same) -> Hashable:
    """What ``value`` holds, part by part.

    Followed are collections, functions (their code, defaults and cells), partials, bound methods and objects
    of somebody's own classes. Of all else, and behind 10,000 parts, stands what ``opaque`` makes of it.
    Nothing of the value runs.
    """
    return _Walk(opaque).describe(value, 0)


class _Walk:
    def __init__(self, opaque: Callable[[Any], Hashable]):
        self._opaque, self._left = opaque, _MOST
        self._open: set[int] = set()

    def describe(self, value: Any, depth: int = 0) -> Hashable:
        kind = type(value)
        if kind in PLAIN or issubclass(kind, np.generic):
            return kind, repr(value)  # NaN is NaN, and 1 is not True
        if kind is types.CodeType:
            return value
        if issubclass(kind, type | Enum | torch.dtype) or _is_builtin(value):
            return Same(value)
        if id(value) in self._open:
            return "again"
        parts = _parts(value)
        self._left -= 1
        if parts is None or depth > _DEEP or self._left < 0:
            return self._opaque(value)
        self._open.add(id(value))
        found = [self.describe(part, depth + 1) for part in parts]
        self._open.discard(id(value))
        # Of a class that was written anew, as a notebook's cell is run again, the methods may differ.
        return Same(kind), frozenset(found) if issubclass(kind, set | frozenset | dict) else tuple(found)


def _is_builtin(value: Any) -> bool:
    """Whether a value is a function written in C, of no object."""
    return type(value) is types.BuiltinFunctionType and type(value.__self__) in (type(None), types.ModuleType)


def _parts(value: Any) -> Iterable[Any] | None:
    """What a value is made of; None for one that is not looked into."""
    kind = type(value)
    if issubclass(kind, dict):
        return _few(dict.items(value))
    for collection in _COLLECTIONS:
        if issubclass(kind, collection):
            return _few(collection.__iter__(value))
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [value.__code__, value.__defaults__, value.__kwdefaults__, *cells]
    if kind is partial:
        return [value.func, value.args, value.keywords]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if issubclass(kind, types.ModuleType | nn.Module | torch.Tensor):
        return None
    if not (kind is types.SimpleNamespace or is_authors(kind)):
        return None
    return _few(state_of(value))


def _few(parts: Iterable[Any]) -> list[Any] | None:
    found = list(islice(parts, _MOST))
    return None if len(found) == _MOST else found


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
