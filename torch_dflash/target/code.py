"""What code a model may run, and the values that its author's part of it reads."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any

from torch import Tensor, nn
from transformers import activations, masking_utils, modeling_rope_utils

from torch_dflash.target.describe import describe, is_plain, state_of, vars_of
from torch_dflash.target.origins import Same, at_home, is_authors, links, module_is_authors

_COMMON = (activations, masking_utils, modeling_rope_utils)  # what modelling files of transformers call
_DEEP = 4  # a.b.c.d


def functions_of(model: nn.Module) -> set[Any]:
    """What ``model`` may run: methods of its modules and their bases, and what their files hold.

    Callables that cannot be looked into are among them, as tokens.
    """
    kinds = _kinds(model)
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    spaces = [*map(vars, kinds), *(vars(sys.modules[name]) for name in names), *map(vars, _COMMON)]
    return {link for space in spaces for value in list(space.values()) for link in links(value)}


def code_of(model: nn.Module) -> frozenset[Any]:
    """`functions_of`, values of the classes, and what functions not at home read."""
    functions = functions_of(model)
    return frozenset(functions | _fields(_kinds(model)) | _read_by(functions))


def names_read(functions: Iterable[Any]) -> set[str]:
    """The names and words in the code of the functions not at home."""
    return {
        name
        for link in functions
        if isinstance(link, FunctionType) and not at_home(link)
        for name in _names(link.__code__, words=True)
    }


def _kinds(model: nn.Module) -> set[type]:
    """The classes of the modules, and the bases of these beside torch's."""
    kinds = {base for module in model.modules() for base in type(module).__mro__}
    own = {type(module) for module in model.modules()}
    return own | {base for base in kinds if not base.__module__.startswith(("torch.", "builtins"))}


def _fields(kinds: Iterable[type]) -> set[Any]:
    """The values that classes hold: of those at home the plain ones, for nobody changes the others."""
    return {
        (kind, name, describe(value, _opaque))
        for kind in kinds
        for name, value in list(vars(kind).items())
        if not name.startswith("__") and (is_plain(value) or is_authors(kind))
    }


def _opaque(value: Any) -> Any:
    """An object that is not looked into; a tensor as it was written last."""
    counted = issubclass(type(value), Tensor) and not value.is_inference()
    return (Same(value), value._version) if counted else Same(value)


def _read_by(functions: Iterable[Any]) -> set[Any]:
    """What the code of functions not at home names, and of those that it names in turn."""
    found: set[Any] = set()
    left = [link for link in functions if isinstance(link, FunctionType) and not at_home(link)]
    while left:
        function = left.pop()
        for name, value in _named_by(function):
            found.add((function.__code__, name, describe(value, _opaque)))
            kind = value if issubclass(type(value), type) else type(value)
            if is_authors(kind):
                found |= _fields(kind.__mro__)
            new = [link for link in _called(value) if link not in found and not at_home(link)]
            found.update(new)
            left += [link for link in new if isinstance(link, FunctionType)]
    return found


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Where a function may read: globals that its code names, attributes of these, cells, defaults."""
    names, space = _names(function.__code__), function.__globals__
    for name in names:
        # What a function imports for itself is no global of its file.
        value = space[name] if name in space else sys.modules.get(name)
        if value is not None:
            yield from _with_attributes(name, value, names, _DEEP)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != CellType())
    yield "defaults", function.__defaults__
    yield from (function.__kwdefaults__ or {}).items()


def _with_attributes(where: str, value: Any, names: set[str], depth: int) -> Iterator[tuple[str, Any]]:
    yield where, value
    if depth == 0 or issubclass(type(value), ModuleType) and not module_is_authors(value):
        return
    for name in names:
        for held in (vars_of(value), vars(type(value))):
            if name in held:
                yield from _with_attributes(f"{where}.{name}", held[name], names, depth - 1)


def _called(value: Any) -> Iterator[Any]:
    """The functions that a value may run: behind it, in it, of its class and of the classes it is."""
    left, seen = [value], 0
    while left and seen < 1_000:
        value, seen = left.pop(), seen + 1
        yield from links(value)
        if issubclass(type(value), type):
            if is_authors(value):
                yield from (
                    link for base in value.__mro__ for one in vars(base).values() for link in links(one)
                )
        elif type(value) in (list, tuple, set, frozenset):
            left += value
        elif type(value) is dict:
            left += value.values()
        elif not issubclass(type(value), FunctionType | ModuleType) and is_authors(type(value)):
            left += [type(value), *(held for _, held in state_of(value))]


def _names(code: CodeType, words: bool = False) -> set[str]:
    """The names that code reads, that of the functions inside it too; with ``words``, its strings."""
    found = set(code.co_names)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            found |= _names(one, words)
        elif words and isinstance(one, str):
            found.add(one)
    return found
