"""Detects changes of a live model or its code since the copy, by identity, once a call."""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from operator import itemgetter
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules import module as torch_module
from transformers import PreTrainedConfig, activations, masking_utils, modeling_rope_utils
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_dflash.targets.closure_values import DEEP as _DEEP
from torch_dflash.targets.closure_values import MOST, globals_of, inner_values, is_library_code
from torch_dflash.targets.hooks import TORCHS, hooks_of
from torch_dflash.targets.skeleton import configs_of

# Attributes of a module or a config that change no text: modes, names, fields of gradients and losses,
# defaults of `generate`, a forward's choice of outputs, fields of model cards and loaders.
IGNORED = TORCHS | frozenset(
    "gradient_checkpointing vocab_size padding_idx problem_type output_router_logits name_or_path "
    "_name_or_path architectures auto_map tokenizer_class transformers_version id2label label2id dtype "
    "torch_dtype bos_token_id eos_token_id pad_token_id use_cache output_attentions output_hidden_states "
    "return_dict rope_deltas model_tags main_input_name input_modalities output_modalities loss_type "
    "base_model_prefix supports_gradient_checkpointing generation_config hf_device_map hf_quantizer "
    "_attn_implementation _attn_implementation_internal _experts_implementation_internal _loss_function "
    "_is_hf_initialized _commit_hash _output_capturing_hooks_installed _gradient_checkpointing_func "
    "_compiled_call_impl _compiled_call _last_compile_config _require_grads_hook _require_grads_hooks "
    "_previous_max_cache_length _is_accelerate_prepared _is_torch_compile".split()
)
# Attributes that transformers and Python cache on classes.
_CACHED = frozenset(
    "_auto_class _can_set_attn_implementation_cached_value _can_set_experts_implementation_cached_value "
    "_abc_impl __abstractmethods__ __annotations__ __doc__ __weakref__ __dict__ __warningregistry__".split()
)
_HELPERS = {part.__name__ for part in (activations, masking_utils, modeling_rope_utils)}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SMALL = 1 << 16
_MISSING = object()

Check = Callable[[Any], bool]
"""Whether a value is unchanged."""


class Guard:
    """State of a model, without its weights, that its text depends on. Keeps no model alive.

    Covers modules, their attributes and hooks, configs, classes, and the globals that functions of modelling
    files read. Plain values are compared by value; collections and objects in attributes, and closure
    variables and globals of hooks and patches, by their contents, four levels deep. Deeper changes, and
    in-place changes of a modelling file's globals, are not detected.

    Args:
        model: the live model.
    """

    def __init__(self, model: nn.Module):
        self._freed, on_free = False, self._on_free
        self._modules = {path: _Module(module, on_free) for path, module in model.named_modules()}
        configs = [part for config in configs_of(model) for part in parts_of(config)]
        self._spaces = [_Space(_dict_of(part), IGNORED, _DEEP, on_free) for part in configs]
        self._spaces += spaces_of_classes(classes_of(model), on_free)
        for kind in {type(module) for module in model.modules()}:  # torch's, too
            self._spaces.append(_Space(partial(_forward_of, kind), frozenset(), 0, on_free))
        first = configs[0] if configs else None
        self._spaces.append(_Space(partial(_global_code, first), frozenset(), 0, on_free))
        self._spaces.append(_Space(partial(vars, functional), _CACHED, 0, on_free))

    @classmethod
    def of_classes(cls, model: nn.Module) -> Guard:
        """A guard of a model's classes and the globals that they read, for every model of these classes."""
        guard = cls.__new__(cls)
        guard._freed, kinds = False, [*classes_of(model), *map(type, configs_of(model))]
        guard._modules, guard._spaces = {}, spaces_of_classes(kinds, guard._on_free)
        return guard

    def ignore(self, written: Iterable[tuple[str, str]]) -> None:
        """Ignore these (module's path, attribute) from now on: a forward writes them."""
        for path, key in written:
            self._modules[path].ignore(key)

    def holds(self) -> bool:
        """Whether nothing has changed."""
        freed, self._freed = self._freed, False  # the id of a freed value may be another's
        parts = *self._modules.values(), *self._spaces
        return all(part.is_same() if freed else part.holds() for part in parts)

    def _on_free(self, _: Any) -> None:
        self._freed = True


class _Space:
    """The entries of the dict of ``read``: compared by ids, and one by one where ids differ."""

    def __init__(self, read: Callable[[], Mapping | None], ignored: frozenset[str], deep: int, on_free: Any):
        self._read, self._ignored = read, ignored
        found = dict(read() or {})
        self._ids = tuple(map(id, found.values()))
        # A user's function, such as a patch of a modelling file, is inspected in any space.
        levels = {key: deep or _DEEP * _is_user_code(value) for key, value in found.items()}
        self._checks = {
            key: _check(value, levels[key], on_free) for key, value in found.items() if key not in ignored
        }
        inside = {key for key in self._checks if type(found[key]) not in _PLAIN and levels[key]}
        fixed = PreTrainedConfig | property | type
        self.inside = [
            key for key in inside if not isinstance(found[key], fixed) and not is_library_code(found[key])
        ]

    def holds(self) -> bool:
        found = self._read()
        if found is None:
            return False
        if tuple(map(id, found.values())) != self._ids:
            return self.is_same()
        return all(self._checks[key](found[key]) for key in self.inside)

    def ignore(self, key: str) -> None:
        self._ignored |= {key}
        self._checks.pop(key, None)
        self.inside = [name for name in self.inside if name != key]

    def is_same(self) -> bool:
        found = dict(self._read() or {})
        known = self._checks.keys() | self._ignored
        if not known >= found.keys() or not all(
            check(found.get(key, _MISSING)) for key, check in self._checks.items()
        ):
            return False
        self._ids = tuple(map(id, found.values()))
        return True


class _Module:
    """A module: its attributes, children, hooks and tensor names."""

    def __init__(self, module: nn.Module, on_free: Any):
        self._module, self._kind = weakref.ref(module), type(module)
        self._own = _Space(read := _dict_of(module), IGNORED, _DEEP, on_free)
        self._spaces = [self._own, _Space(partial(_held, read, "_modules"), frozenset(), 0, on_free)]
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self._spaces.append(_Space(partial(_held, read, name), frozenset(), _DEEP, on_free))
        self._tensors = _tensor_slots(vars(module))
        self._update(vars(module))

    def holds(self) -> bool:
        """Whether nothing has changed, by ids alone where they suffice: a model has hundreds of modules."""
        module = self._module()
        if type(module) is not self._kind:
            return False
        seen = self._quick_ids(module.__dict__)
        return seen is not None and seen == self._seen or self.is_same()

    def is_same(self) -> bool:
        module = self._module()
        if type(module) is not self._kind or _tensor_slots(vars(module)) != self._tensors:
            return False
        if not all(space.is_same() for space in self._spaces):
            return False
        self._update(vars(module))
        return True

    def ignore(self, key: str) -> None:
        self._own.ignore(key)
        if module := self._module():
            self._update(vars(module))

    def _update(self, own: dict[str, Any]) -> None:
        self._entries = itemgetter(
            "_modules", "_parameters", *(key for key in own if key not in self._own._ignored)
        )
        self._seen = self._quick_ids(own)

    def _quick_ids(self, own: dict[str, Any]) -> tuple | None:
        """Ids of all entries; None for modules with hooks or with attributes that have contents."""
        if self._own.inside or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return None
        try:
            values = self._entries(own)
        except KeyError:
            return None
        inside = *own["_modules"].values(), *own["_parameters"].values(), *own["_buffers"].values()
        return len(own), *map(id, values), *map(id, inside)


def _tensor_slots(own: dict[str, Any]) -> list[tuple[str, bool]]:
    """Names of a module's parameters and buffers, and whether each is None."""
    return [(key, leaf is None) for name in ("_parameters", "_buffers") for key, leaf in own[name].items()]


def _is_user_code(value: Any) -> bool:
    """Whether ``value`` is a function or method of neither torch nor transformers."""
    if isinstance(value, type | nn.Module) or not callable(value) or is_library_code(value):
        return False
    return function_of(value) is not None or isinstance(value, MethodType)


def classes_of(model: nn.Module) -> list[type]:
    """The classes of the modules and their bases, without torch's and Python's."""
    found = {base: None for module in model.modules() for base in type(module).__mro__}
    return [kind for kind in found if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc")]


def spaces_of_classes(kinds: list[type], on_free: Any) -> list[_Space]:
    """Spaces of the classes' attributes and of the globals that their functions read."""
    spaces = [_Space(partial(vars, kind), _CACHED, _DEEP, on_free) for kind in kinds]
    for names in globals_read(kinds):
        spaces.append(_Space(partial(_globals, *names), frozenset(), 0, on_free))
    return spaces


def parts_of(config: Any) -> list[Any]:
    """A config and its nested configs."""
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for value in nested for part in parts_of(value))]


def attributes_of(model: nn.Module) -> dict[tuple[str, str], Check]:
    """Checks of the modules' attributes, by (module's path, name)."""
    return {
        (path, key): _check(value, _DEEP, lambda _: None)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in IGNORED
    }


def written_in(model: nn.Module, before: dict[tuple[str, str], Check]) -> frozenset[tuple[str, str]]:
    """The attributes of ``model`` that changed since `attributes_of` returned ``before``."""
    found = {(path, key): value for path, one in model.named_modules() for key, value in vars(one).items()}
    new = {name for name in found.keys() - before.keys() if name[1] not in IGNORED}
    return frozenset(new | {name for name, check in before.items() if not check(found.get(name, _MISSING))})


def settings(config: Any) -> dict[str, Any]:
    """The fields of a config (or None) that may change a text, nested configs as dicts."""
    found = {}
    for name, value in getattr(config, "__dict__", {}).items():
        if name not in IGNORED and not (name.startswith("_") and hasattr(PreTrainedConfig, name)):
            found[name] = settings(value) if isinstance(value, PreTrainedConfig) else value
    return found


def _dict_of(value: Any) -> Callable[[], dict[str, Any] | None]:
    held = weakref.ref(value)
    return lambda: getattr(held(), "__dict__", None)


def _held(read: Callable[[], dict[str, Any] | None], name: str) -> dict[Any, Any] | None:
    """A module's children or hooks, without transformers' own hooks for hidden states."""
    if (own := read()) is None:
        return None
    return {key: value for key, value in own[name].items() if not is_library_code(value)}


def _forward_of(kind: type) -> dict[str, Any]:
    return {"forward": getattr(kind, "forward", None)}


def _globals(space: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: space.get(name, _MISSING) for name in names}


def globals_read(kinds: list[type]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """(globals, names) that methods of ``kinds`` read, and the functions of their files that they call."""
    read = [kind for kind in kinds if not kind.__module__.startswith("transformers.") or _is_modelling(kind)]
    files = {kind.__module__ for kind in read} | _HELPERS
    left: list[Any] = [value for kind in read for value in vars(kind).values()]
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    seen: set[int] = set()
    while left:
        function = function_of(left.pop())
        if function is None or id(function) in seen:
            continue
        if is_library_code(function) and function.__module__ not in files:
            continue
        seen.add(id(function))
        space, names = globals_of(function)
        found.setdefault(id(space), (space, set()))[1].update(names)
        left += [space[name] for name in names]
        left += [getattr(function, "__wrapped__", None)]
    return [(space, tuple(sorted(names))) for space, names in found.values()]


def _is_modelling(kind: type) -> bool:
    return kind.__module__.startswith("transformers.models.")


def function_of(value: Any) -> FunctionType | None:
    """The function of a method, property or partial; None for other values."""
    for name in ("__func__", "fget", "func"):
        if type(value) is not FunctionType and not isinstance(value, type | nn.Module | Tensor):
            value = getattr(value, name, None) or value
    return value if type(value) is FunctionType else None


def _global_code(config: Any) -> dict[str, Any]:
    """The functions that our attention and experts replace, and torch's global hooks."""
    found = {
        "attention": ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None)),
        "mask": ALL_MASK_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None)),
        "experts": ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None)),
    }
    everywhere = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    return found | {f"hook {number}": hook for one in everywhere for number, hook in one.items()}


def _check(value: Any, deep: int, on_free: Any) -> Check:
    """A check that a later value equals ``value``; keeps no part of the model alive."""
    if type(value) in _PLAIN:
        return lambda now: type(now) is type(value) and (now == value or now != now and value != value)
    same = _identity(value, on_free)
    if isinstance(value, Tensor):
        return _check_tensor(value, same)
    if isinstance(value, np.ndarray):
        array = value.copy() if value.size <= _SMALL else None
        return lambda now: same(now) and (array is None or array.tobytes() == now.tobytes())
    if not deep or isinstance(value, PreTrainedConfig | type | ModuleType) or is_library_code(value):
        return same
    if isinstance(value, nn.Module):
        return _check_module(value, same, on_free)
    if isinstance(value, dict | list | tuple | deque) and len(value) > MOST:
        size = len(value)  # a table: single entries are not compared
        return lambda now: same(now) and len(now) == size
    if isinstance(value, dict):
        inner = {key: _check(held, deep - 1, on_free) for key, held in value.items()}
        return lambda now: (
            isinstance(now, dict)
            and now.keys() == inner.keys()
            and all(check(now[key]) for key, check in inner.items())
        )
    if isinstance(value, list | tuple | deque):
        kind, checks = type(value), [_check(held, deep - 1, on_free) for held in value]
        return lambda now: (
            type(now) is kind
            and len(now) == len(checks)
            and all(check(held) for check, held in zip(checks, now, strict=True))
        )
    if isinstance(value, set | frozenset):
        known = frozenset(map(id, value)), len(value)
        return lambda now: same(now) and (frozenset(map(id, now)), len(now)) == known
    if isinstance(value, MethodType) and not isinstance(value.__self__, nn.Module):
        deep += 1  # an object is as deep as its method; modules are inspected at any depth
    checks = {key: _check(held, deep - 1, on_free) for key, held in inner_values(value).items()}

    def check(now: Any) -> bool:
        found = inner_values(now) if same(now) else {}
        return same(now) and found.keys() == checks.keys() and all(checks[key](found[key]) for key in checks)

    return check


def _check_tensor(value: Tensor, same: Check) -> Check:
    """A check of a tensor that is no weight, such as a hook's vector: a program may contain it."""
    version = None if value.is_inference() else value._version
    own = type(value) not in (
        Tensor,
        nn.Parameter,
        nn.Buffer,
    )  # a quantised tensor may not support comparison
    small = value.device.type == "cpu" and value.numel() <= _SMALL
    kept = value.detach().clone() if small and not own else None

    def check(now: Any) -> bool:
        if not same(now) or (None if now.is_inference() else now._version) != version:
            return False
        if kept is None or now.shape != kept.shape or now.dtype != kept.dtype:
            return kept is None
        return torch.equal(now, kept) or bool((now == kept).logical_or(now != now).all())

    return check


def _check_module(value: nn.Module, same: Check, on_free: Any) -> Check:
    """A check of a module in a closure or an object: a program may contain its tensors."""

    def shown(part: nn.Module) -> dict[Any, Any]:
        own = {key: held for key, held in vars(part).items() if key not in IGNORED}
        hooks = dict(enumerate(hooks_of(part))) | {"class": type(part)}
        return own | part._parameters | part._buffers | part._modules | hooks

    def checked(held: Any) -> Check:
        return _identity(held, on_free) if isinstance(held, nn.Module) else _check(held, 1, on_free)

    found = [
        (weakref.ref(part), {key: checked(held) for key, held in shown(part).items()})
        for part in value.modules()
    ]

    def check(now: Any) -> bool:
        alive = [(part(), checks) for part, checks in found]
        return same(now) and all(
            part is not None
            and shown(part).keys() == checks.keys()
            and all(checks[key](held) for key, held in shown(part).items())
            for part, checks in alive
        )

    return check


def _identity(value: Any, on_free: Any) -> Check:
    try:
        held = weakref.ref(value, on_free)
    except TypeError:  # a value without weak references is small, or a collection
        return lambda now: now is value
    return lambda now: now is held() and now is not None
