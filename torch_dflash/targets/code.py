"""What code a model may run, and the values that its author's part of it reads."""

from __future__ import annotations

import dis
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import lru_cache
from importlib.util import resolve_name
from types import CellType, CodeType, FunctionType, ModuleType
from typing import Any, NamedTuple
from weakref import WeakKeyDictionary

from torch import Tensor, nn
from transformers import PreTrainedConfig, activations, masking_utils, modeling_rope_utils

from torch_dflash.targets.describe import MEMORY, PLAIN, describe, digest, is_plain, parts, vars_of
from torch_dflash.targets.origins import (
    Same,
    at_home,
    is_authors,
    links,
    module_is_authors,
    own_bases,
    packages_of,
)

_COMMON = (activations, masking_utils, modeling_rope_utils)  # what modelling files of transformers call
_DEEP = 4  # a.b.c.d
_OF = ":"  # in names, between a module and what it holds
_MOST = 10_000  # things in a value that may run
_BUILDERS = ("__init__", "_init_weights")  # these have run
_NOTES = (  # that transformers makes in a class
    "_auto_class",
    "_can_set_attn_implementation_cached_value",
    "_can_set_experts_implementation_cached_value",
)


def functions_of(model: nn.Module) -> set[Any]:
    """What ``model`` may run: methods of its modules and their bases, and what their files hold.

    Callables that cannot be looked into are among them, as tokens.
    """
    kinds = _kinds(model)
    names = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    spaces = [*map(vars, kinds), *(vars(sys.modules[name]) for name in names), *map(vars, _COMMON)]
    return {link for space in spaces for value in list(space.values()) for link in links(value)}


def code_of(model: nn.Module, written: frozenset[Any] | None = None) -> frozenset[Any]:
    """`functions_of`, the config's classes, values of the classes, and what functions not at home read.

    ``written``: the names that are left out; unset, those that `noting_writes` found of the model's class.
    """
    written = written_by(model) if written is None else written
    functions, configs = functions_of(model), [type(part) for part in parts_of(model.config)]
    kinds = _kinds(model)
    with packages_of(kinds):
        kinds |= {base for kind in configs for base in kind.__mro__ if is_authors(base)}
        found = _fields(kinds, written)
        for kind in filter(is_authors, kinds):
            for name, value in _vars(kind):
                if (Same(kind), name) not in written:
                    functions |= _look_into(value, written, found)
        found |= _read_by(functions, written)
    return frozenset(found | set(map(_token, functions)) | set(map(Same, configs)))


_written: WeakKeyDictionary[type, frozenset[Any]] = WeakKeyDictionary()


def written_by(model: nn.Module) -> frozenset[Any]:
    """The names whose values forwards of the model's class write themselves, as far as is known."""
    return _written.get(type(model), frozenset())


@contextmanager
def noting_writes(model: nn.Module) -> Iterator[Callable[[], None]]:
    """While open, forwards of the model's class run; the names whose values they change are kept for it.

    `code_of` leaves these names out, for this model and others of its class, as long as the process lives.
    What is called after the first forward tells that all is imported: what changes later is a write.
    """
    known = written_by(model)
    before, loaded = code_of(model, known), set(sys.modules)
    snapshots = []
    yield lambda: snapshots.append(code_of(model, known))
    after = code_of(model, known)
    first = snapshots[0] if snapshots else after
    there = {entry[:2] for entry in before if isinstance(entry, tuple)}
    holders, imported = {holder for holder, _ in there}, sys.modules.keys() - loaded
    changed = {entry[:2] for entry in before ^ first if isinstance(entry, tuple)}

    early = {entry[:2] for entry in first if isinstance(entry, tuple)}
    later = {entry[:2] for entry in first ^ after if isinstance(entry, tuple)}
    # What is new may have come with a module that was imported meanwhile: then it is no write.
    new = {name for name in changed | later if name[0] in holders and _OF not in name[1]}
    made = {name for name in new if name[1] not in imported}
    _written[type(model)] = known | changed & there | later & early | made


def parts_of(config: Any) -> list[Any]:
    """A config and those that are nested in it."""
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for value in nested for part in parts_of(value))]


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
    own = {type(module) for module in model.modules()}
    return own | {base for kind in own for base in own_bases(kind)}


def _vars(kind: type) -> list[tuple[str, Any]]:
    return list(vars(kind).items())


def _fields(kinds: Iterable[type], written: frozenset[Any]) -> set[Any]:
    """The values that classes hold: of those at home the plain ones, for nobody changes the others."""
    return {
        (Same(kind), name, describe(value, _opaque))
        for kind in kinds
        for name, value in _vars(kind)
        if not name.startswith("__") and name not in _NOTES and (Same(kind), name) not in written
        if is_plain(value) or is_authors(kind)
    }


def _token(link: Any) -> Same:
    """Stands for a function, which may hold the model."""
    return link if isinstance(link, Same) else Same(link)


def _opaque(value: Any) -> Any:
    """An object that is not looked into; a tensor by its values, or as it was written last."""
    if not issubclass(type(value), Tensor):
        return Same(value)
    return digest(value) or (Same(value), None if value.is_inference() else value._version)


def _read_by(functions: Iterable[Any], written: frozenset[Any]) -> set[Any]:
    """What the code of functions not at home names, and of those that it names in turn."""
    found: set[Any] = set()
    told: dict[int, tuple[Any, Any]] = {}  # by id: the value, which so keeps its id, and its description
    left = [link for link in functions if isinstance(link, FunctionType) and not at_home(link)]
    while left:
        function = left.pop()
        for name, value in _named_by(function):
            if (function.__code__, name) in written:
                continue
            if id(value) not in told:
                told[id(value)] = value, describe(value, _opaque)
                more = [link for link in _look_into(value, written, found) if not at_home(link)]
                left += [link for link in more if isinstance(link, FunctionType) and Same(link) not in found]
                found |= set(map(_token, more))
            found.add((function.__code__, name, told[id(value)][1]))
    return found


def _look_into(value: Any, written: frozenset[Any], found: set[Any]) -> set[Any]:
    """What may run in a value; the values of the classes there are added to ``found``."""
    functions: set[Any] = set()
    for held in _inside(value):
        kind = held if issubclass(type(held), type) else type(held)
        if is_authors(kind):
            found |= _fields(kind.__mro__, written)
        functions.update(links(held))
    return functions


def _named_by(function: FunctionType) -> Iterator[tuple[str, Any]]:
    """Where a function may read: globals that its code names, attributes of these, cells, defaults."""
    names, space = _names(function.__code__), function.__globals__
    named = {name: space[name] for name in names.globals & space.keys()}
    for name in names.modules:  # what it imports for itself
        whole = _absolute(name, space.get("__package__"))
        if whole in sys.modules:
            named[whole] = sys.modules[whole]
    for name, value in named.items():
        yield from _with_attributes(name, value, names.attributes | names.words, _DEEP)
    cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
    yield from ((name, cell.cell_contents) for name, cell in cells if cell != CellType())
    yield "defaults", function.__defaults__
    yield from (function.__kwdefaults__ or {}).items()


def _absolute(name: str, package: Any) -> str | None:
    try:
        return resolve_name(name, package)
    except ImportError:
        return None


def _with_attributes(where: str, value: Any, names: frozenset[str], depth: int) -> Iterator[tuple[str, Any]]:
    yield where, value
    in_module = issubclass(type(value), ModuleType)
    if depth == 0 or in_module and not module_is_authors(value):
        return
    mode = {"training"} if issubclass(type(value), nn.Module) else set()  # no text depends on it here
    for name in names - mode:
        for held in (vars_of(value), vars(type(value))):
            if name in held:
                inner = f"{where}{_OF if in_module else '.'}{name}"
                yield from _with_attributes(inner, held[name], names, depth - 1)


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
        elif kind is not FunctionType and not issubclass(kind, MEMORY):
            left += parts(value) or ()
            left += [kind] if is_authors(kind) and not issubclass(kind, nn.Module) else []


class _Names(NamedTuple):
    """What a code object and those inside it name: globals, modules, attributes, and their strings."""

    globals: frozenset[str]
    modules: frozenset[str]
    attributes: frozenset[str]
    words: frozenset[str]


@lru_cache(maxsize=4096)
def _names(code: CodeType) -> _Names:
    kinds: tuple[set[str], ...] = (set(), set(), set(), set())
    steps = list(dis.get_instructions(code))
    for index, step in enumerate(steps):
        if isinstance(step.argval, str):
            dots = "." * steps[index - 2].argval if step.opname == "IMPORT_NAME" else ""  # of a relative one
            for kind, names in zip(_NAMING, kinds, strict=False):
                if step.opname in kind:
                    names.add(dots + step.argval)
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
