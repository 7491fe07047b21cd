"""Whether a live model still is what its class and config describe: what runs is built from those alone."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Hashable
from functools import lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, PreTrainedModel

from torch_dflash.targets.attributes import (
    ABSENT,
    IGNORED,
    attributes,
    is_as_described,
    says_something,
    written_in,
)
from torch_dflash.targets.code import names_read
from torch_dflash.targets.describe import PLAIN, describe, is_plain, state_of
from torch_dflash.targets.origins import at_home, links, of_transformers, own_bases
from torch_dflash.targets.tested import check_implementations

_OF_EVERY_CONFIG = frozenset(name for name in dir(PreTrainedConfig()) if name.startswith("_"))


class _Module(NamedTuple):
    """The skeleton's module; its attributes, described; what its class alone should have; its own names."""

    module: nn.Module | None
    attributes: list[tuple[str, Any, Hashable]]
    of_class: frozenset[str]
    names: frozenset[str]


class _Described(NamedTuple):
    """What a skeleton's modules say of themselves, and the model's config when its engine was built.

    ``written``: as `written_in` has it.
    """

    modules: dict[str, _Module]
    written: dict[tuple[str, str], Any]
    configs: dict[str, dict[str, Any]]
    config: dict[str, Any]


_NONE = _Module(None, [], frozenset(), frozenset())


def settings(config: Any) -> dict[str, Any]:
    """The fields of a config (or None) that may decide what text comes, nested configs as dicts."""
    found = {}
    for name, value in getattr(config, "__dict__", {}).items():
        if name in IGNORED or name in _OF_EVERY_CONFIG:
            continue
        if isinstance(value, PreTrainedConfig):
            found[name] = settings(value)
        else:
            said = is_plain(value) or isinstance(value, torch.dtype)
            found[name] = value if said else describe(value, type)
    return found


def check_unmodified(skeleton: nn.Module, model: nn.Module) -> None:
    """Refuse a model whose modules are not those that its class and config describe.

    The skeleton runs instead of the model, so what a hook, a replaced module, an attribute or a config field
    changed after loading does to the model would silently not happen. Compared are the types of all modules,
    their attributes (as `describe` sees them; of objects that it does not look into, the types, of tensors
    the dtypes, and the values where both can be read) and the configs' fields.

    Raises:
        ValueError: naming the first such module, attribute or field.
    """
    known = vars(skeleton).get("_described") or remember(skeleton, model)
    check_implementations(getattr(model, "config", None))
    everywhere = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    hooks = [hook for one in everywhere for hook in one.values()]
    _refuse_foreign([hook for hook in hooks if not all(map(at_home, links(hook)))], "torch.nn.Module")
    if settings(getattr(model, "config", None)) != known.config:
        _refuse_config(known.config, model)
    seen, alike = 0, set()
    for name, module in model.named_modules():
        twin, described, of_class, names = known.modules.get(name, _NONE)
        if twin is None or type(twin) is not type(module):
            _refuse(_where(model, name), _describe(module), _describe(twin))
        seen += 1
        own = vars(module)
        inner = own.get("config")
        pair = id(inner), id(known.configs.get(name))
        if name in known.configs and pair not in alike:  # most modules share one config
            if settings(inner) != known.configs[name]:
                _refuse_config(known.configs[name], module)
            check_implementations(inner)
            alike.add(pair)
        for key, value, description in described:
            found = own.get(key, ABSENT)
            if not _is_plainly(found, value) and not is_as_described(found, description):
                if not _is_forwards(found, known.written.get((name, key))):
                    _refuse(f"{_where(model, name)}.{key}", _show(found), _show(value))
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or not of_class.isdisjoint(own):
            _refuse_hooks(_where(model, name), module)
            _refuse_class_attributes(_where(model, name), module, names)
        if not own.keys() <= names:
            _refuse_late(_where(model, name), module, names | of_class)
    if seen < len(known.modules):
        name = min(known.modules.keys() - dict(model.named_modules()).keys())
        _refuse(_where(model, name), "absent", _describe(known.modules[name].module))


def _is_forwards(found: Any, written: Any) -> bool:
    """Whether a forward keeps this for itself: the constant that it writes, or what changes as it runs."""
    return written is not None and is_as_described(found, written)


def remember(
    skeleton: nn.Module,
    model: nn.Module,
    tried: nn.Module | None = None,
    build: Callable[[], nn.Module] | None = None,
) -> _Described:
    """Describe a skeleton before its first forward, which may change it.

    ``tried``: another one, after its first forward; ``build`` makes a third, if it takes one to tell what
    forwards write.
    """
    written = {} if tried is None or build is None else written_in(skeleton, tried, build)
    known = _describe_all(skeleton, model, written)
    object.__setattr__(skeleton, "_described", known)  # goes with the skeleton
    return known


def _describe_all(skeleton: nn.Module, model: nn.Module, written: dict[tuple[str, str], Any]) -> _Described:
    modules = {
        name: _describe_one(module, {key for at, key in written if at == name} - vars(module).keys())
        for name, module in skeleton.named_modules()
    }
    shared: dict[int, dict[str, Any]] = {}
    configs = {}
    for name, module in skeleton.named_modules():
        config = vars(module).get("config")
        if name and config is not None:
            if id(config) not in shared:
                root = config is vars(skeleton).get("config")
                shared[id(config)] = copy.deepcopy(
                    settings(getattr(model, "config", None) if root else config)
                )
            configs[name] = shared[id(config)]
    return _Described(modules, written, configs, copy.deepcopy(settings(getattr(model, "config", None))))


def _describe_one(module: nn.Module, added: set[str]) -> _Module:
    own, kind = vars(module), type(module)
    of_class = _methods(kind) | _fields(kind) - own.keys()
    return _Module(module, attributes(module, added), of_class, frozenset({*own, *added}))


def _refuse_late(where: str, module: nn.Module, names: frozenset[str]) -> None:
    """What was added after loading: a tensor, or what the author's code asks for by its name."""
    for name, value in vars(module).items():
        if (
            name not in names
            and says_something(name)
            and (isinstance(value, Tensor) or name in _names_read(type(module)))
        ):
            _refuse(f"{where}.{name}", _show(value), "absent")


def _show(value: Any) -> str:
    """A value in a message: an object that does not print itself by what it holds."""
    if isinstance(value, Tensor):
        return f"a tensor {tuple(value.shape)} in {value.dtype}"
    if value is ABSENT:
        return "absent"
    silent = type(value).__repr__ is object.__repr__
    return f"{type(value).__name__} of {dict(state_of(value))}" if silent else repr(value)


@lru_cache(maxsize=4096)
def _names_read(kind: type) -> frozenset[str]:
    """What the code of a class and its bases asks for, as far as it is not transformers' or torch's."""
    held = [value for base in own_bases(kind) for value in vars(base).values()]
    return frozenset(names_read(link for value in held for link in links(value)))


def _is_plainly(found: Any, value: Any) -> bool:
    """Whether two values are one number or word: most are, and that is seen at once."""
    return type(found) in PLAIN and type(found) is type(value) and found == value


def _refuse_class_attributes(where: str, module: nn.Module, names: frozenset[str]) -> None:
    """A value of the instance's own, in place of its class's."""
    for name in (vars(module).keys() - names) & _fields(type(module)):
        found, value = vars(module)[name], getattr(type(module), name)
        if describe(found, type) != describe(value, type):
            _refuse(f"{where}.{name}", repr(found), repr(value))


@lru_cache(maxsize=4096)
def _fields(kind: type) -> frozenset[str]:
    """The values of a class, descriptors and functions apart."""
    names = [name for name in dir(kind) if says_something(name) and not hasattr(nn.Module, name)]
    held = {name: inspect.getattr_static(kind, name) for name in names}
    return frozenset(
        name for name, value in held.items() if not callable(value) and not hasattr(type(value), "__get__")
    )


def _refuse(where: str, found: str, wanted: str) -> None:
    found += " of other values" if found == wanted else ""
    raise ValueError(
        f"{where} is {found}, by the model's config it should be {wanted}. Undo the change, or merge "
        "adapters and dequantise, before passing the model; what changes by itself, keep elsewhere."
    )


def _refuse_config(before: dict[str, Any], model: Any) -> None:
    now, kind = settings(model.config), type(model).__name__
    name = next(name for name in before | now if before.get(name, ABSENT) != now.get(name, ABSENT))
    raise ValueError(
        f"{kind}.config.{name} is {now.get(name)!r}, it was {before.get(name)!r} when this engine was built. "
        "Set it back, or build another engine for the changed model."
    )


_CALLED = frozenset({"forward", "__call__", "_call_impl", "_wrapped_call_impl"})


@lru_cache(maxsize=4096)
def _methods(kind: type) -> frozenset[str]:
    """What a class does: an instance that has one of these of its own does something else."""
    base = PreTrainedModel if issubclass(kind, PreTrainedModel) else nn.Module
    names = _CALLED | set(dir(kind)) - set(dir(base))
    return frozenset(name for name in names if callable(getattr(kind, name, None)))


def _is_own(module: nn.Module, name: str) -> bool:
    """Whether what stands in the instance is the class's own method, put back after it was wrapped.

    accelerate puts it back without the decorators that transformers gave it. A ``generate`` that came with
    a repository is what calls a loop, and nothing that a loop runs.
    """
    found = vars(module)[name]
    if name == "generate" and isinstance(found, partial):
        return found.keywords.get("model") is module
    if getattr(found, "__self__", None) is not module:
        return False
    function = getattr(found, "__func__", None)
    for link in links(getattr(type(module), name)):
        if link is function or not at_home(link):
            return link is function
    return False


def _refuse_hooks(where: str, module: nn.Module) -> None:
    if "_hf_hook" in vars(module):
        raise ValueError(
            f"{where} carries accelerate's {type(vars(module)['_hf_hook']).__name__}, which would not run; "
            "call accelerate.hooks.remove_hook_from_module(model, recurse=True), or load the model without "
            "offloading, before passing it."
        )
    _refuse_foreign([*module._forward_pre_hooks.values(), *module._forward_hooks.values()], where)
    for name in sorted(vars(module).keys() & _methods(type(module))):
        if not _is_own(module, name):
            raise ValueError(
                f"{where} carries a replaced {name}, which would not run; delete it (`del model"
                f"{where.partition('.')[1] + where.partition('.')[2]}.{name}`) before passing the model."
            )


def _refuse_foreign(hooks: list[Any], where: str) -> None:
    # transformers leaves its own hooks for ``output_hidden_states``; they change nothing.
    foreign = [hook for hook in hooks if not of_transformers(hook)]
    if foreign:
        what = getattr(foreign[0], "__qualname__", foreign[0])
        raise ValueError(f"{where} carries {what}, which would not run; remove it before passing the model.")


def _where(model: nn.Module, name: str) -> str:
    return f"{type(model).__name__}.{name}" if name else type(model).__name__


def _describe(module: nn.Module | None) -> str:
    return "absent" if module is None else f"{type(module).__name__}({module.extra_repr()})"
