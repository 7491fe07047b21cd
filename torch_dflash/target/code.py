"""What code a model may run, and the values that its author's part of it reads."""

from __future__ import annotations

import dis
import sys
from collections.abc import Iterable, Iterator
from functools import lru_cache, partial
from types import CellType, CodeType, FunctionType, MethodType, ModuleType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import activations, masking_utils, modeling_rope_utils

from torch_dflash.target.describe import PLAIN, contents, describe, is_plain, state_of, vars_of
from torch_dflash.target.origins import Same, at_home, is_authors, links, module_is_authors

_COMMON = (activations, masking_utils, modeling_rope_utils)  # what modelling files of transformers call
_DEEP = 4  # a.b.c.d
_MOST = 10_000  # things in a value that may run
_BUILDERS = ("__init__", "_init_weights")  # these have run


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
    functions, kinds = functions_of(model), _kinds(model)
    held = [value for kind in kinds if is_authors(kind) for value in vars(kind).values()]
    inner = {link for value in held for part in _inside(value) for link in links(part)}
    return frozenset(functions | inner | _fields(kinds) | _read_by(functions | inner))


def names_read(functions: Iterable[Any]) -> set[str]:
    """The attributes that functions not at home ask for as they run, and the words in their code."""
    names: set[str] = set()
    for link in functions:
        if isinstance(link, FunctionType) and not at_home(link) and link.__name__ not in _BUILDERS:
            read = _names(link.__code__)
            names |= read.attributes | read.words
    return names


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
            for held in _inside(value):
                kind = held if issubclass(type(held), type) else type(held)
                if is_authors(kind):
                    found |= _fields(kind.__mro__)
                for link in [link for link in links(held) if not at_home(link) and link not in found]:
                    found.add(link)
                    left += [link] if isinstance(link, FunctionType) else []
    return found


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Where a function may read: globals that its code names, attributes of these, cells, defaults."""
    names, space = _names(function.__code__), function.__globals__
    named = {name: space[name] for name in names.globals & space.keys()}
    for name in names.modules:  # what it imports for itself, in its package or anywhere
        for whole in (f"{space.get('__package__')}.{name}", name):
            if whole in sys.modules:
                named[whole] = sys.modules[whole]
    for name, value in named.items():
        yield from _with_attributes(name, value, names.attributes, _DEEP)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != CellType())
    yield "defaults", function.__defaults__
    yield from (function.__kwdefaults__ or {}).items()


def _with_attributes(where: str, value: Any, names: frozenset[str], depth: int) -> Iterator[tuple[str, Any]]:
    yield where, value
    if depth == 0 or issubclass(type(value), ModuleType) and not module_is_authors(value):
        return
    mode = {"training"} if issubclass(type(value), nn.Module) else set()  # no text depends on it here
    for name in names - mode:
        for held in (vars_of(value), vars(type(value))):
            if name in held:
                yield from _with_attributes(f"{where}.{name}", held[name], names, depth - 1)


def _inside(value: Any) -> Iterator[Any]:
    """A value and what lies in it that may run: entries, attributes, classes and what these hold."""
    left, seen = [value], set()
    while left and len(seen) < _MOST:
        value = left.pop()
        kind = type(value)
        if kind in PLAIN or id(value) in seen:
            continue
        seen.add(id(value))
        yield value
        if issubclass(kind, type):
            left += [held for base in value.__mro__ if is_authors(base) for held in vars(base).values()]
        elif kind is partial:
            left += [value.func, *value.args, *value.keywords.values()]
        elif kind is MethodType:
            left.append(value.__self__)
        elif not issubclass(kind, FunctionType | ModuleType | nn.Module | Tensor):
            left += contents(value) or ()
            if is_authors(kind):
                left += [*(held for _, held in state_of(value)), kind]


class _Names(NamedTuple):
    """What a code object and those inside it name: globals, modules, attributes, and their strings."""

    globals: frozenset[str]
    modules: frozenset[str]
    attributes: frozenset[str]
    words: frozenset[str]


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> _Names:
    kinds: tuple[set[str], ...] = (set(), set(), set(), set())
    for step in dis.get_instructions(code):
        if isinstance(step.argval, str):
            for kind, names in zip(_NAMING, kinds, strict=False):
                if step.opname in kind:
                    names.add(step.argval)
    for one in code.co_consts:
        if isinstance(one, CodeType):
            for names, more in zip(kinds, _names(one), strict=True):
                names |= more
        elif isinstance(one, str):
            kinds[3].add(one)
    return _Names(*map(frozenset, kinds))


_NAMING = (
    {"LOAD_GLOBAL", "LOAD_NAME"},
    {"IMPORT_NAME"},
    {"LOAD_ATTR", "LOAD_METHOD", "LOAD_SUPER_ATTR", "IMPORT_FROM"},
)
