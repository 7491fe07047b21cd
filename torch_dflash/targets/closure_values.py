"""Values reachable from a callable or an object, and the containers among them that it may change."""

from __future__ import annotations

import operator
import os
import sys
from collections import deque
from collections.abc import Iterator
from functools import partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor, nn

DEEP = 4
MOST = 1_000
_BUILT_IN = ("builtins", "torch")
_HOLDERS = ("argparse", "collections", "types")
"""Standard modules whose objects have attributes of users: namespaces and collections."""
_LIBRARIES = ("torch", "transformers", "numpy", "jax", "torch_dflash", "jax_bridge")
_FILES = str(torch.__file__), str(transformers.__file__), os.path.dirname(__file__)
_PACKAGE = os.path.dirname(os.path.dirname(__file__)) + os.sep
_PYTHON = os.path.dirname(os.__file__) + os.sep
_LIBRARY_FILES = tuple(os.path.dirname(path) + os.sep for path in _FILES)


class Names(NamedTuple):
    """Globals in a function's code."""

    space: dict[str, Any]
    names: tuple[str, ...]


def is_library_code(value: Any) -> bool:
    """Whether a function is transformers', torch's or ours, which read no global that anybody sets."""
    if isinstance(value, classmethod | staticmethod):
        value = value.__func__
    # By its code: `functools.wraps` gives a user's function the name of the module that it wraps.
    known = isinstance(value, FunctionType) and value.__code__.co_filename.startswith(_LIBRARY_FILES)
    return known and not _holds_users(value, DEEP)


def _holds_users(function: FunctionType, deep: int) -> bool:
    """Whether a decorator, such as `torch.no_grad`, has put this function around one of a user."""
    for cell in function.__closure__ or () if deep else ():
        held = None if cell == CellType() else cell.cell_contents
        if isinstance(held, MethodType):
            if not _is_library(type(held.__self__).__module__):
                return True
            held = held.__func__
        if isinstance(held, FunctionType):
            file = held.__code__.co_filename
            python = file.startswith(_PYTHON) and "-packages" not in file
            if (
                not python
                and not file.startswith((*_LIBRARY_FILES, _PACKAGE))
                or _holds_users(held, deep - 1)
            ):
                return True
    return False


def names_in(code: CodeType) -> Iterator[str]:
    """Names of globals and attributes in code."""
    yield from code.co_names
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            yield from names_in(inner)


def globals_of(function: FunctionType) -> Names:
    """The globals in ``function``'s code."""
    space = function.__globals__
    return Names(space, tuple(name for name in dict.fromkeys(names_in(function.__code__)) if name in space))


def cells_of(function: FunctionType) -> dict[str, CellType]:
    """The closure variables of ``function`` that have a value."""
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    return {name: cell for name, cell in cells if cell != CellType()}


def inner_values(value: Any) -> dict[str, Any]:
    """Closure variables and globals of a function; contents of a method, a partial or a user's object."""
    if isinstance(value, FunctionType):
        space, names = globals_of(value)
        found = {name: space[name] for name in names}  # a closure variable may have the same name
        found |= _globals_of_owners(value, found)
        found |= {f"cell {name}": cell.cell_contents for name, cell in cells_of(value).items()}
        return found | {"default values": value.__defaults__, "keyword defaults": value.__kwdefaults__}
    if isinstance(value, MethodType):
        return {"function": value.__func__, "self": value.__self__}
    if isinstance(value, partial):
        return {"function": value.func, "args": value.args, "more": value.keywords}
    slots = {name: getattr(value, name) for name in _slots_of(type(value)) if hasattr(value, name)}
    return (attributes(value) or {}) | slots | _class_values(type(value))


def _globals_of_owners(function: FunctionType, found: dict[str, Any]) -> dict[str, Any]:
    """Values of users' modules and classes in ``function``'s code, such as ``settings.GAIN``."""
    names = set(names_in(function.__code__))
    inside = {}
    for owner, held in found.items():
        if isinstance(held, ModuleType) and not _is_library(held.__name__):
            space = vars(held)
        elif isinstance(held, type):
            space = _class_values(held)
        else:
            continue
        inside |= {f"{owner}.{name}": space[name] for name in names & space.keys()}
    return inside


def _is_library(module: str) -> bool:
    root = module.partition(".")[0]
    return root in _LIBRARIES or root in sys.stdlib_module_names - {"__main__"}


def _class_values(kind: type) -> dict[str, Any]:
    """Attributes and methods of a user's class, without Python's own."""
    found = {}
    for base in reversed(kind.__mro__[:-1]):
        if not _is_library(base.__module__):
            found |= {name: value for name, value in vars(base).items() if not name.startswith("__")}
    return found


def attributes(value: Any) -> dict[str, Any] | None:
    """Attributes of a user's object; None for Python's own, such as a logger, which changes them itself."""
    root = type(value).__module__.partition(".")[0]
    if root in sys.stdlib_module_names - {"__main__", *_HOLDERS}:
        return None
    own = getattr(value, "__dict__", None)
    return own if isinstance(own, dict) else None


def _slots_of(kind: type) -> list[str]:
    slots = [vars(base).get("__slots__", ()) for base in kind.__mro__ if base.__module__ not in _BUILT_IN]
    names = [name for own in slots for name in ((own,) if isinstance(own, str) else own)]
    return [name for name in names if not name.startswith("__")]


def holders(value: Any, deep: int = DEEP) -> list[Any]:
    """The collections, attributes of objects, cells and named globals reachable from ``value``."""
    if not deep or isinstance(value, nn.Module | Tensor | type | ModuleType) or is_library_code(value):
        return []
    if isinstance(value, list | dict | set | deque):
        own: list[Any] = [value]
        inner = [*(value.values() if isinstance(value, dict) else value)]
    else:
        inner, own = [*inner_values(value).values()], []
        if isinstance(value, FunctionType):
            own = [*cells_of(value).values(), globals_of(value)]
        elif (held := attributes(value)) is not None:
            own = [held]
        deep += isinstance(value, MethodType | partial)
    return [*own, *(one for held in inner[:MOST] for one in holders(held, deep - 1))]


def entries(holder: Any) -> list[Any]:
    """Contents of a holder, for `restore`."""
    if isinstance(holder, CellType):
        return [holder.cell_contents]
    if isinstance(holder, Names):
        return [holder.space.get(name) for name in holder.names]
    if isinstance(holder, dict):
        return [one for entry in holder.items() for one in entry]
    return list(holder)


def restore(holder: Any, before: list[Any]) -> bool:
    """Restore the contents ``before``, of `entries`; return whether they had changed."""
    now = entries(holder)
    if len(now) == len(before) and not any(map(operator.is_not, now, before)):
        return False
    if isinstance(holder, CellType):
        holder.cell_contents = before[0]
    elif isinstance(holder, Names):
        holder.space.update(zip(holder.names, before, strict=True))
    elif isinstance(holder, dict):
        kept = dict(zip(before[::2], before[1::2], strict=True))
        for key in holder.keys() - kept.keys():
            del holder[key]
        holder.update(kept)
    else:
        holder.clear()
        (holder.update if isinstance(holder, set) else holder.extend)(before)
    return True
