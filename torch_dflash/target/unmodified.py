"""Whether a live model still is what its class and config describe: what runs is built from those alone."""

from __future__ import annotations

import copy
from functools import lru_cache, partial
from types import BuiltinFunctionType, CellType, FunctionType
from typing import Any, NamedTuple

from torch import Tensor, nn
from transformers import PreTrainedModel

from torch_dflash.target.code import at_home, is_plain, links, of_transformers
from torch_dflash.target.tested import check_implementations

# No text depends on these, of a module or a config: modes, names, what only gradients or a loss read,
# defaults of `generate`, which outputs a forward returns, what a model card or a loader reads. What a
# vocabulary's size decides are shapes.
IGNORED = frozenset(
    "training gradient_checkpointing vocab_size padding_idx problem_type output_router_logits "
    "name_or_path architectures auto_map tokenizer_class transformers_version id2label label2id dtype "
    "torch_dtype bos_token_id eos_token_id pad_token_id use_cache output_attentions output_hidden_states "
    "return_dict rope_deltas model_tags main_input_name input_modalities output_modalities loss_type "
    "base_model_prefix supports_gradient_checkpointing _attn_implementation".split()
)
_BOOKKEEPING = frozenset(vars(nn.Module())) | set(dir(PreTrainedModel))
_ABSENT = object()


class _Module(NamedTuple):
    """The skeleton's module; its plain attributes; what its class alone should have; the names of its own."""

    module: nn.Module | None
    attributes: list[tuple[str, Any]]
    of_class: frozenset[str]
    names: frozenset[str]


class _Described(NamedTuple):
    """What a skeleton's modules say of themselves, and the model's config when its engine was built."""

    modules: dict[str, _Module]
    configs: dict[str, dict[str, Any]]
    config: dict[str, Any]


_NONE = _Module(None, [], frozenset(), frozenset())


def settings(config: Any) -> dict[str, Any]:
    """The fields of a config (or None) that may decide what text comes, nested configs as dicts."""
    found = {}
    for name, value in getattr(config, "__dict__", {}).items():
        if name in IGNORED or name.startswith("_"):
            continue
        if is_plain(value) or isinstance(value, dict):
            found[name] = value
        elif hasattr(value, "to_dict"):
            found[name] = settings(value)
    return found


def check_unmodified(skeleton: nn.Module, model: nn.Module) -> None:
    """Refuse a model whose modules are not those that its class and config describe.

    The skeleton runs instead of the model, so what a hook, a replaced module, an attribute or a config field
    changed after loading does to the model would silently not happen. Compared are the types of all modules,
    their plain attributes (numbers, strings, None, functions, collections of those) and the configs' fields.

    Raises:
        ValueError: naming the first such module, attribute or field.
    """
    known = vars(skeleton).get("_described")
    if known is None:
        known = _describe_all(skeleton, model)
        object.__setattr__(skeleton, "_described", known)  # goes with the skeleton
    check_implementations(getattr(model, "config", None))
    if settings(getattr(model, "config", None)) != known.config:
        _refuse_config(known.config, model)
    seen, alike = 0, set()
    for name, module in model.named_modules():
        twin, attributes, of_class, names = known.modules.get(name, _NONE)
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
        for key, value in attributes:
            found = own.get(key, _ABSENT)
            if found is not value and not _same(found, value):
                said = "absent" if found is _ABSENT else repr(found)
                _refuse(f"{_where(model, name)}.{key}", said, repr(value))
        if own["_forward_pre_hooks"] or own["_forward_hooks"] or not of_class.isdisjoint(own):
            _refuse_hooks(_where(model, name), module)
            _refuse_class_attributes(_where(model, name), module, names)
        if not own.keys() <= names:
            _refuse_tensors(_where(model, name), own, names)
    if seen < len(known.modules):
        name = min(known.modules.keys() - dict(model.named_modules()).keys())
        _refuse(_where(model, name), "absent", _describe(known.modules[name].module))


def _describe_all(skeleton: nn.Module, model: nn.Module) -> _Described:
    modules = {name: _describe_one(module) for name, module in skeleton.named_modules()}
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
    return _Described(modules, configs, copy.deepcopy(settings(getattr(model, "config", None))))


def _describe_one(module: nn.Module) -> _Module:
    own, kind = vars(module), type(module)
    of_class = _methods(kind) | _fields(kind) - own.keys()
    return _Module(module, _attributes(module), of_class, frozenset(own))


def _refuse_tensors(where: str, own: dict[str, Any], names: frozenset[str]) -> None:
    """A tensor that is neither weight nor buffer, where there should be none."""
    for name in own.keys() - names:
        if isinstance(own[name], Tensor):
            _refuse(f"{where}.{name}", f"a tensor {tuple(own[name].shape)}", "absent")


def _attributes(module: nn.Module) -> list[tuple[str, Any]]:
    kept = [(name, value) for name, value in vars(module).items() if _says_something(name)]
    return [(name, copy.deepcopy(value)) for name, value in kept if is_plain(value) or _is_function(value)]


def _says_something(name: str) -> bool:
    """Whether an attribute of this name may decide what text comes: torch's own private ones do not."""
    return name not in IGNORED and not (name.startswith("_") and name in _BOOKKEEPING)


def _is_function(value: Any) -> bool:
    return isinstance(value, FunctionType | BuiltinFunctionType | partial)


def _same(found: Any, value: Any) -> bool:
    if isinstance(value, partial):
        same = isinstance(found, partial) and _same(found.func, value.func)
        return same and (found.args, found.keywords) == (value.args, value.keywords)
    if isinstance(value, FunctionType):
        return isinstance(found, FunctionType) and _same_function(found, value)
    return (is_plain(found) or _is_function(found)) and found == value


def _same_function(found: FunctionType, value: FunctionType) -> bool:
    """Of one code, with the same defaults, closed over the same: of objects it is the type that is seen."""
    return found.__code__ == value.__code__ and all(
        one is other
        or _same(one, other)
        or not (is_plain(other) or _is_function(other))
        and type(one) is type(other)
        for one, other in zip(_held(found), _held(value), strict=True)
    )


def _held(function: FunctionType) -> list[Any]:
    cells = [cell.cell_contents for cell in function.__closure__ or () if cell != CellType()]
    return [function.__defaults__, function.__kwdefaults__, *cells]


def _refuse_class_attributes(where: str, module: nn.Module, names: frozenset[str]) -> None:
    """A plain value of the instance's own, in place of its class's."""
    for name in (vars(module).keys() - names) & _fields(type(module)):
        found, value = vars(module)[name], getattr(type(module), name)
        if not _same(found, value):
            _refuse(f"{where}.{name}", repr(found), repr(value))


@lru_cache(maxsize=4096)
def _fields(kind: type) -> frozenset[str]:
    """The plain values of a class."""
    names = [name for name in dir(kind) if _says_something(name) and not hasattr(nn.Module, name)]
    return frozenset(name for name in names if is_plain(getattr(kind, name, nn)))


def _refuse(where: str, found: str, wanted: str) -> None:
    raise ValueError(
        f"{where} is {found}, by the model's config it should be {wanted}. Undo the change, or merge "
        "adapters and dequantise, before passing the model."
    )


def _refuse_config(before: dict[str, Any], model: Any) -> None:
    now, kind = settings(model.config), type(model).__name__
    name = next(name for name in before | now if before.get(name, _ABSENT) != now.get(name, _ABSENT))
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

    accelerate puts it back without the decorators that transformers gave it.
    """
    found = vars(module)[name]
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
    hooks = [*module._forward_pre_hooks.values(), *module._forward_hooks.values()]
    # transformers leaves its own hooks for ``output_hidden_states``; they change nothing.
    foreign = [hook for hook in hooks if not of_transformers(hook)]
    if foreign:
        what = getattr(foreign[0], "__qualname__", foreign[0])
        raise ValueError(f"{where} carries {what}, which would not run; remove it before passing the model.")
    for name in sorted(vars(module).keys() & _methods(type(module))):
        if not _is_own(module, name):
            raise ValueError(
                f"{where} carries a replaced {name}, which would not run; delete it (`del model"
                f"{where.partition('.')[1] + where.partition('.')[2]}.{name}`) before passing the model."
            )


def _where(model: nn.Module, name: str) -> str:
    return f"{type(model).__name__}.{name}" if name else type(model).__name__


def _describe(module: nn.Module | None) -> str:
    return "absent" if module is None else f"{type(module).__name__}({module.extra_repr()})"
