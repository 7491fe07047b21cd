"""A value as something that can be compared: descriptions are equal where the values act alike."""

from __future__ import annotations

import gc
import hashlib
import types
from argparse import Namespace
from array import array
from collections import ChainMap, UserDict, UserList, UserString, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from enum import Enum
from functools import partial
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import nn

from torch_dflash.targets.origins import Same, is_authors

PLAIN = (int, float, complex, bool, str, bytes, type(None))
MEMORY = (np.ndarray, np.generic, bytearray, array)
_COLLECTIONS = (list, tuple, set, frozenset, deque)
_OPEN = (types.SimpleNamespace, Namespace, UserDict, UserList, UserString, ChainMap)
MOST = 400_000
"""Parts of one value that are looked at, keys and entries each: as many as a table over a vocabulary has."""
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
    """What ``value`` holds, part by part, 16 deep.

    Followed are collections, functions (their code, globals by identity, defaults and cells), partials, bound
    methods and objects of somebody's own classes; arrays by a digest of their memory. Of all else (modules,
    tensors, objects of libraries), of what is deeper and of a part with more in it than is left of `MOST`
    stands what ``opaque`` makes of it. Nothing of the value runs.
    """
    return _Walk(opaque).describe(value)


class _Walk:
    def __init__(self, opaque: Callable[[Any], Hashable]):
        self._opaque, self._left = opaque, MOST
        self._open: set[int] = set()

    def describe(self, value: Any, depth: int = 0) -> Hashable:
        kind = type(value)
        if kind in PLAIN:  # NaN is NaN, 0 is not -0, 1 is not True
            return kind, kind.__repr__(value) if kind in (float, complex) else value
        if kind is types.CodeType:
            return value
        if kind is torch.dtype:
            return kind, repr(value)
        if issubclass(kind, type | Enum) or _is_builtin(value):
            return Same(value)
        if id(value) in self._open:
            return "again"
        found = None if depth > _DEEP else parts(value)
        held = None if found is None else list(islice(found, self._left + 1))
        if held is None or len(held) > self._left:
            return self._opaque(value)
        self._left -= len(held)
        self._open.add(id(value))
        told = [self.describe(part, depth + 1) for part in held]
        self._open.discard(id(value))
        # Of a class that was written anew, as a notebook's cell is run again, the methods may differ.
        return Same(kind), frozenset(told) if issubclass(kind, set | frozenset) else tuple(told)


def _is_builtin(value: Any) -> bool:
    """Whether a value is a function written in C, of no object."""
    return type(value) is types.BuiltinFunctionType and type(value.__self__) in (type(None), types.ModuleType)


def parts(value: Any) -> Iterable[Any] | None:
    """What a value is made of: keys and entries, names and attributes; None for one that is not looked into.

    Words and numbers apart, they are the value's own objects, none made here: an ``id`` of one stays its own.
    """
    kind = type(value)
    if kind is types.FunctionType:
        cells = [cell.cell_contents for cell in value.__closure__ or () if cell != types.CellType()]
        return [value.__code__, id(value.__globals__), value.__defaults__, value.__kwdefaults__, *cells]
    if kind is partial:
        return [value.func, value.args, value.keywords]
    if kind is types.MethodType:
        return [value.__func__, value.__self__]
    if kind is types.MappingProxyType:
        return gc.get_referents(value)  # the mapping
    if issubclass(kind, types.ModuleType | nn.Module | torch.Tensor):
        return None
    inside = _contents(value)
    if inside is None and not (kind in _OPEN or is_authors(kind)):
        return None
    own = () if kind is dict or kind in _COLLECTIONS else sorted(state_of(value), key=_name)
    return chain(inside or (), *own)


def _contents(value: Any) -> Iterable[Any] | None:
    """The keys and entries of a collection; a number of a kind of its own, or an array, as a plain one."""
    kind = type(value)
    if issubclass(kind, dict):
        return chain.from_iterable(dict.items(value))
    for collection in _COLLECTIONS:
        if issubclass(kind, collection):
            return collection.__iter__(value)
    if issubclass(kind, MEMORY):
        held = digest(value)
        return None if held is None else [held]
    if kind in (range, slice):
        return [value.start, value.stop, value.step]
    if issubclass(kind, int):
        return [int.__index__(value)]
    for base in (float, complex, str, bytes):
        if issubclass(kind, base):
            return [base.__repr__(value)]
    return None


def digest(value: Any) -> str | None:
    """Type, shape and bytes of an array or a tensor in the host's memory, in a word; None of all else."""
    kind = type(value)
    if kind in (bytearray, array):
        form, held = getattr(value, "typecode", ""), bytes(value)
    elif issubclass(kind, np.ndarray | np.generic) and not issubclass(kind, np.memmap):
        base: Any = np.ndarray if issubclass(kind, np.ndarray) else np.generic  # a subclass is not asked
        form = base.dtype.__get__(value), base.shape.__get__(value)
        if form[0].hasobject:
            return None
        held = base.tobytes(value)
    elif kind in (torch.Tensor, nn.Parameter) and value.device.type == "cpu" and _is_dense(value):
        form = value.dtype, tuple(value.shape)
        flat = value.detach().resolve_conj().resolve_neg().reshape(-1).contiguous()
        held = flat.view(torch.uint8).numpy()
    else:
        return None
    return f"{form} {hashlib.blake2b(held, digest_size=16).hexdigest()}"


def _is_dense(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


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
