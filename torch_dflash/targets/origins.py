"""Whose code a function is: transformers' and torch's own, or somebody else's."""

from __future__ import annotations

import inspect
import os
import sys
import sysconfig
import weakref
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cached_property, lru_cache, partial, partialmethod
from pathlib import Path
from types import BuiltinFunctionType, CodeType, FunctionType, GenericAlias, MethodType, ModuleType
from typing import Any

import accelerate
import torch
import transformers

TRANSFORMERS = str(Path(transformers.__file__).parent) + os.sep
_HOMES = (
    TRANSFORMERS,
    *(str(Path(file or "").parent) + os.sep for file in (torch.__file__, accelerate.__file__)),
    str(Path(__file__).parents[1]) + os.sep,
)
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_PACKAGES = "-packages" + os.sep
_FOREIGN = (_PACKAGES, os.sep + "unittest" + os.sep)  # a mock runs what it was given
_HEAP = 1 << 9  # a class that was written in Python
_CLOSED = (type, BuiltinFunctionType, GenericAlias)
_BARE = frozenset(map(id, (bool, bytes, complex, dict, float, frozenset, int, list, set, str, tuple)))
_own_packages: ContextVar[frozenset[str]] = ContextVar("own_packages", default=frozenset())


def at_home(link: Any) -> bool:
    """Whether a function is of transformers, torch, accelerate, this package or Python."""
    return _is_home(_file_of(link))


def of_transformers(value: Any) -> bool:
    """Whether a callable is transformers' own, by where its code is."""
    return all(_file_of(link).startswith(TRANSFORMERS) for link in links(value))


@contextmanager
def packages_of(kinds: Iterable[type]) -> Iterator[None]:
    """While open, installed packages that these classes are of are somebody's own too."""
    found = [module for module in map(_module_of, kinds) if _is_installed(static(module, "__file__"))]
    token = _own_packages.set(frozenset(map(_package_of, found)))
    try:
        yield
    finally:
        _own_packages.reset(token)


def is_authors(kind: type) -> bool:
    """Whether a class is somebody's own: not at home, builtin, or of an installed package."""
    if kind.__module__ in sys.builtin_module_names:
        return bool(kind.__flags__ & _HEAP) and kind.__module__ == "builtins"  # of an `exec` without a name
    return module_is_authors(_module_of(kind))


def module_is_authors(module: Any) -> bool:
    """Whether a module is somebody's own: a notebook's and a namespace's have no file."""
    file = static(module, "__file__")
    if not isinstance(file, str):
        return static(module, "__name__") not in sys.builtin_module_names
    return not _is_home(file) and (_PACKAGES not in file or _package_of(module) in _own_packages.get())


def own_bases(kind: type) -> list[type]:
    """A class and its bases, beside torch's and builtin ones."""
    return [base for base in kind.__mro__ if not _is_basic(base)]


def links(value: Any) -> Iterator[Any]:
    """The functions behind a value: itself, and what a decorator, a descriptor or a partial of it wraps.

    A callable that shows none is its own last link. Classes and builtins have none. Nothing of the value
    runs: an object may answer every question with a new object, or raise.
    """
    if id(type(value)) in _BARE:  # most are; a class may have a hash and an equality of its own
        return
    seen: list[Any] = []
    while value is not None and not _is(value, _CLOSED) and not any(value is one for one in seen):
        seen.append(value)
        if _is(value, FunctionType):
            yield value
            value = vars(value).get("__wrapped__")
        elif _is(value, (MethodType, staticmethod, classmethod)):
            value = value.__func__
        elif _is(value, (partial, partialmethod, cached_property)):
            value = value.func
        elif _is(value, property):
            value = value.fget
        else:
            yield from _of_object(value)
            value = static(value, "__wrapped__")


def static(value: Any, name: str) -> Any:
    """An attribute as it stands, None for none: asked of the object, it might run anything."""
    if type(value) is ModuleType:
        return value.__dict__.get(name)
    try:
        return inspect.getattr_static(value, name, None)
    except Exception:  # an object whose ``__dict__`` raises
        return None


class Same:
    """Stands for an object in a key: equal to another of the same object, which it does not keep alive."""

    def __init__(self, value: Any):
        self._id = id(value)
        try:
            self._value = weakref.ref(value)
        except TypeError:
            self._value = lambda: value

    def __eq__(self, other: Any) -> bool:
        mine = self._value()
        return isinstance(other, Same) and mine is not None and mine is other._value()

    def __hash__(self) -> int:
        return self._id

    def __repr__(self) -> str:
        return f"<{self._id}>"


def _of_object(value: Any) -> Iterator[Any]:
    """The functions of an object that stands for one; a token of the object where they are not at home."""
    kind = type(value)
    calls = [_of_kind(kind, name) for name in ("__get__", "__call__")]
    found = [call for call in calls if _is(call, FunctionType)]
    yield from found
    opaque = not found and calls[1] is not None and static(value, "__wrapped__") is None
    if opaque or not all(map(at_home, found)):
        yield Same(value)


def _of_kind(kind: type, name: str) -> Any:
    """What instances of a class have by this name; its metaclass is not asked."""
    return next((vars(base)[name] for base in kind.__mro__ if name in vars(base)), None)


def _is(value: Any, kinds: Any) -> bool:
    """`isinstance`, by the type alone: ``__class__`` may be a property."""
    return issubclass(type(value), kinds)


def _is_basic(kind: type) -> bool:
    name = kind.__module__
    return name.startswith("torch.") or name == "builtins" and not is_authors(kind)


def _module_of(kind: type) -> Any:
    return sys.modules.get(kind.__module__)


def _package_of(module: Any) -> str:
    return str(static(module, "__name__")).partition(".")[0]


def _is_installed(file: Any) -> bool:
    return isinstance(file, str) and _PACKAGES in file and not _is_home(file)


@lru_cache(maxsize=4096)
def _is_home(file: str) -> bool:
    standard = file.startswith((_STANDARD, "<frozen ")) and not any(part in file for part in _FOREIGN)
    return file.startswith(_HOMES) or standard


def _file_of(link: Any) -> str:
    code = link.__code__ if _is(link, FunctionType) else None
    return code.co_filename if isinstance(code, CodeType) else ""
