"""What code a model may run, whose it is, and the values that its author's part of it reads."""

from __future__ import annotations

import os
import sys
import sysconfig
from collections.abc import Iterable, Iterator
from functools import cached_property, partial, partialmethod
from pathlib import Path
from types import BuiltinFunctionType, CellType, CodeType, FunctionType, GenericAlias, MethodType
from typing import Any

import accelerate
import torch
import transformers
from torch import nn

TRANSFORMERS = str(Path(transformers.__file__).parent) + os.sep
_HOMES = (
    TRANSFORMERS,
    *(str(Path(file or "").parent) + os.sep for file in (torch.__file__, accelerate.__file__)),
    str(Path(__file__).parents[1]) + os.sep,
)
_STANDARD = sysconfig.get_paths()["stdlib"] + os.sep
_FOREIGN = ("-packages" + os.sep, os.sep + "unittest" + os.sep)  # a mock runs what it was given
_PLAIN = (int, float, str, type(None))  # bool is an int
_CLOSED = type | BuiltinFunctionType | GenericAlias


def functions_of(model: nn.Module) -> set[Any]:
    """What ``model`` may run: methods of its modules and their bases, and what their files hold.

    Callables that cannot be looked into are among them.
    """
    kinds = _kinds(model)
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    spaces = [*map(vars, kinds), *(vars(sys.modules[name]) for name in names)]
    return {link for space in spaces for value in list(space.values()) for link in links(value)}


def code_of(model: nn.Module) -> frozenset[Any]:
    """`functions_of`, plain values of the classes, and what functions not at home read."""
    functions = functions_of(model)
    fields = {
        (kind, name, repr(value))
        for kind in _kinds(model)
        for name, value in list(vars(kind).items())
        if not name.startswith("__") and is_plain(value)
    }
    return frozenset(functions | fields | _read_by(functions))


def is_plain(value: Any) -> bool:
    """Whether a value is a number, a word, None, or a collection of those."""
    if isinstance(value, list | tuple | set | frozenset):
        return all(map(is_plain, value))
    if isinstance(value, dict):
        return all(map(is_plain, [*value, *value.values()]))
    return isinstance(value, _PLAIN) and value == value  # NaN equals nothing


def at_home(link: Any) -> bool:
    """Whether a function is of transformers, torch, accelerate, this package or Python."""
    file = _file_of(link)
    standard = file.startswith((_STANDARD, "<frozen ")) and not any(part in file for part in _FOREIGN)
    return file.startswith(_HOMES) or standard


def of_transformers(value: Any) -> bool:
    """Whether a callable is transformers' own, by where its code is."""
    return all(_file_of(link).startswith(TRANSFORMERS) for link in links(value))


def links(value: Any) -> Iterator[Any]:
    """The functions behind a value: itself, and what a decorator, a descriptor or a partial of it wraps.

    A callable that shows none is its own last link. Classes and builtins have none.
    """
    while value is not None and not isinstance(value, _CLOSED):
        if isinstance(value, FunctionType):
            yield value
            value = vars(value).get("__wrapped__")
        elif isinstance(value, MethodType):
            yield value  # of this object: another one's may do something else
            value = value.__func__
        elif isinstance(value, staticmethod | classmethod):
            value = value.__func__
        elif isinstance(value, partial | partialmethod | cached_property):
            value = value.func
        elif isinstance(value, property):
            value = value.fget
        else:
            yield from _of_object(value)
            value = getattr(value, "__wrapped__", None) if callable(value) else None


def _of_object(value: Any) -> Iterator[Any]:
    """The functions of an object that stands for one; the object itself where they are not at home."""
    calls = [getattr(type(value), "__get__", None), getattr(type(value), "__call__", None)]  # noqa: B004
    found = [call for call in calls if isinstance(call, FunctionType)]
    yield from found
    opaque = not found and callable(value) and not hasattr(value, "__wrapped__")
    if opaque or not all(map(at_home, found)):
        yield value if type(value).__hash__ else type(value)


def _file_of(link: Any) -> str:
    code = getattr(link, "__code__", None)
    return code.co_filename if isinstance(code, CodeType) else ""


def _kinds(model: nn.Module) -> set[type]:
    """The classes of the modules, and the bases of these beside torch's."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    own = {type(module) for module in model.modules()}
    return own | {base for base in kinds if not base.__module__.startswith(("torch.", "builtins"))}


def _read_by(functions: Iterable[Any]) -> set[Any]:
    """What the code of functions not at home names, and of those that it names: functions, plain values."""
    found, left = set(), [link for link in functions if isinstance(link, FunctionType) and not at_home(link)]
    while left:
        function = left.pop()
        for name, value in _named_by(function):
            if is_plain(value):
                found.add((function.__code__, name, repr(value)))
            new = [link for link in links(value) if link not in found and not at_home(link)]
            found.update(new)
            left += [link for link in new if isinstance(link, FunctionType)]
    return found


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Where a function may read: globals that its code names, attributes of these, cells, defaults."""
    names = _names(function.__code__)
    for name in names & function.__globals__.keys():
        value = function.__globals__[name]
        yield name, value
        for space in (getattr(value, "__dict__", {}), vars(type(value))):
            yield from ((inner, space[inner]) for inner in names & space.keys())
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != CellType())
    yield "defaults", function.__defaults__
    yield from (function.__kwdefaults__ or {}).items()


def _names(code: CodeType) -> set[str]:
    """The names that code reads, that of the functions inside it too."""
    inner = [one for one in code.co_consts if isinstance(one, CodeType)]
    return set(code.co_names).union(*map(_names, inner))
