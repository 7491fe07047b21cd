"""Sees that a live model, or code that it runs, is no longer what was copied: by identity, once a call."""

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
from torch_dflash.targets.closure_values import MOST, globals_of, is_theirs, parts
from torch_dflash.targets.hooks import TORCHS, hooks_of
from torch_dflash.targets.skeleton import configs_of

# No text depends on these, of a module or a config: modes, names, what only gradients or a loss read,
# defaults of `generate`, which outputs a forward returns, what a model card or a loader reads.
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
# What transformers and Python note in a class as they ask it something.
_NOTES = frozenset(
    "_auto_class _can_set_attn_implementation_cached_value _can_set_experts_implementation_cached_value "
    "_abc_impl __abstractmethods__ __annotations__ __doc__ __weakref__ __dict__ __warningregistry__".split()
)
_HELPERS = {part.__name__ for part in (activations, masking_utils, modeling_rope_utils)}
_PLAIN = (int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)
_SMALL = 1 << 16
_MISSING = object()

Check = Callable[[Any], bool]
"""Whether a value is still what it was."""


class Guard:
    """What a model's text depends on beside its weights, as it is now. The model may be freed.

    Looked at are the modules, their attributes and hooks, the configs, the classes, and the names that
    functions of the modelling files read. A plain value counts by its value; a collection or an object in an
    attribute, and what a hook or a patch closes over or names, by what they hold, four levels deep. What lies
    deeper, and a global of a modelling file that is changed in place, is not seen.

    Args:
        model: the live model.
    """

    def __init__(self, model: nn.Module):
        self._doubt, note = False, self._note
        self._modules = {path: _Module(module, note) for path, module in model.named_modules()}
        parts = [part for config in configs_of(model) for part in parts_of(config)]
        self._spaces = [_Space(_dict_of(part), IGNORED, _DEEP, note) for part in parts]
        self._spaces += classes_guarded(classes_of(model), note)
        for kind in {type(module) for module in model.modules()}:  # torch's, too
            self._spaces.append(_Space(partial(_forward_of, kind), frozenset(), 0, note))
        self._spaces.append(_Space(partial(_swapped, parts[0] if parts else None), frozenset(), 0, note))
        self._spaces.append(_Space(partial(vars, functional), _NOTES, 0, note))

    @classmethod
    def of_classes(cls, model: nn.Module) -> Guard:
        """Of the classes of a model and what they read, whichever model of them is asked."""
        guard = cls.__new__(cls)
        guard._doubt, kinds = False, [*classes_of(model), *map(type, configs_of(model))]
        guard._modules, guard._spaces = {}, classes_guarded(kinds, guard._note)
        return guard

    def ignore(self, written: Iterable[tuple[str, str]]) -> None:
        """From now on: these (module's path, attribute), which a forward writes itself."""
        for path, key in written:
            self._modules[path].ignore(key)

    def holds(self) -> bool:
        """Whether nothing was changed."""
        doubt, self._doubt = self._doubt, False  # something was freed: its address may be another's
        parts = *self._modules.values(), *self._spaces
        return all(part.is_same() if doubt else part.holds() for part in parts)

    def _note(self, _: Any) -> None:
        self._doubt = True


class _Space:
    """The entries of a dict that ``read`` gives: ids at first, one by one where ids differ."""

    def __init__(self, read: Callable[[], Mapping | None], ignored: frozenset[str], deep: int, note: Any):
        self._read, self._ignored = read, ignored
        found = dict(read() or {})
        self._ids = tuple(map(id, found.values()))
        # A function of somebody's, such as a patch of a modelling file, is looked into wherever it lies.
        levels = {key: deep or _DEEP * _is_somebodys(value) for key, value in found.items()}
        self._checks = {
            key: _check(value, levels[key], note) for key, value in found.items() if key not in ignored
        }
        inside = {key for key in self._checks if type(found[key]) not in _PLAIN and levels[key]}
        fixed = PreTrainedConfig | property | type
        self.inside = [
            key for key in inside if not isinstance(found[key], fixed) and not is_theirs(found[key])
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
    """A module: its attributes, its children, its hooks, and which tensors it has."""

    def __init__(self, module: nn.Module, note: Any):
        self._module, self._kind = weakref.ref(module), type(module)
        self._own = _Space(read := _dict_of(module), IGNORED, _DEEP, note)
        self._spaces = [self._own, _Space(partial(_held, read, "_modules"), frozenset(), 0, note)]
        for name in ("_forward_pre_hooks", "_forward_hooks"):
            self._spaces.append(_Space(partial(_held, read, name), frozenset(), _DEEP, note))
        self._tensors = _which_tensors(vars(module))
        self._see(vars(module))

    def holds(self) -> bool:
        """As `is_same`, at a glance where that is enough: a model has hundreds of modules."""
        module = self._module()
        if type(module) is not self._kind:
            return False
        seen = self._glance(module.__dict__)
        return seen is not None and seen == self._seen or self.is_same()

    def is_same(self) -> bool:
        module = self._module()
        if type(module) is not self._kind or _which_tensors(vars(module)) != self._tensors:
            return False
        if not all(space.is_same() for space in self._spaces):
            return False
        self._see(vars(module))
        return True

    def ignore(self, key: str) -> None:
        self._own.ignore(key)
        if module := self._module():
            self._see(vars(module))

    def _see(self, own: dict[str, Any]) -> None:
        self._entries = itemgetter(
            "_modules", "_parameters", *(key for key in own if key not in self._own._ignored)
        )
        self._seen = self._glance(own)

    def _glance(self, own: dict[str, Any]) -> tuple | None:
        """What tells modules apart that have no hooks, and attributes without anything inside; else None."""
        if self._own.inside or own["_forward_hooks"] or own["_forward_pre_hooks"]:
            return None
        try:
            values = self._entries(own)
        except KeyError:
            return None
        inside = *own["_modules"].values(), *own["_parameters"].values(), *own["_buffers"].values()
        return len(own), *map(id, values), *map(id, inside)


def _which_tensors(own: dict[str, Any]) -> list[tuple[str, bool]]:
    """Names of a module's parameters and buffers, and whether there is one."""
    return [(key, leaf is None) for name in ("_parameters", "_buffers") for key, leaf in own[name].items()]


def _is_somebodys(value: Any) -> bool:
    """Whether it is a function, or a method, of neither torch nor transformers."""
    if isinstance(value, type | nn.Module) or not callable(value) or is_theirs(value):
        return False
    return function_of(value) is not None or isinstance(value, MethodType)


def classes_of(model: nn.Module) -> list[type]:
    """The classes of the modules and their bases, beside torch's and Python's."""
    found = {base: None for module in model.modules() for base in type(module).__mro__}
    return [kind for kind in found if kind.__module__.partition(".")[0] not in ("torch", "builtins", "abc")]


def classes_guarded(kinds: list[type], note: Any) -> list[_Space]:
    """Spaces of what the classes hold, and of the globals that their functions name."""
    spaces = [_Space(partial(vars, kind), _NOTES, _DEEP, note) for kind in kinds]
    for names in names_read(kinds):
        spaces.append(_Space(partial(_named, *names), frozenset(), 0, note))
    return spaces


def parts_of(config: Any) -> list[Any]:
    """A config and those that are nested in it."""
    nested = [value for value in vars(config).values() if isinstance(value, PreTrainedConfig)]
    return [config, *(part for value in nested for part in parts_of(value))]


def attributes_of(model: nn.Module) -> dict[tuple[str, str], Check]:
    """Checks of the modules' attributes, by module's path and name: which of them a forward writes."""
    return {
        (path, key): _check(value, _DEEP, lambda _: None)
        for path, module in model.named_modules()
        for key, value in vars(module).items()
        if key not in IGNORED
    }


def written_in(model: nn.Module, before: dict[tuple[str, str], Check]) -> frozenset[tuple[str, str]]:
    """The attributes of ``model`` that are others than `attributes_of` saw ``before``."""
    found = {(path, key): value for path, one in model.named_modules() for key, value in vars(one).items()}
    new = {name for name in found.keys() - before.keys() if name[1] not in IGNORED}
    return frozenset(new | {name for name, check in before.items() if not check(found.get(name, _MISSING))})


def settings(config: Any) -> dict[str, Any]:
    """The fields of a config (or None) that may decide what text comes, nested configs as dicts."""
    found = {}
    for name, value in getattr(config, "__dict__", {}).items():
        if name not in IGNORED and not (name.startswith("_") and hasattr(PreTrainedConfig, name)):
            found[name] = settings(value) if isinstance(value, PreTrainedConfig) else value
    return found


def _dict_of(value: Any) -> Callable[[], dict[str, Any] | None]:
    held = weakref.ref(value)
    return lambda: getattr(held(), "__dict__", None)


def _held(read: Callable[[], dict[str, Any] | None], name: str) -> dict[Any, Any] | None:
    """A module's children or hooks, without those that transformers hangs in for hidden states."""
    own = read()
    return None if own is None else {key: value for key, value in own[name].items() if not is_theirs(value)}


def _forward_of(kind: type) -> dict[str, Any]:
    return {"forward": getattr(kind, "forward", None)}


def _named(space: dict[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    return {name: space.get(name, _MISSING) for name in names}


def names_read(kinds: list[type]) -> list[tuple[dict[str, Any], tuple[str, ...]]]:
    """(globals, names of them) that methods of ``kinds`` read, and functions of their files behind them."""
    read = [kind for kind in kinds if not kind.__module__.startswith("transformers.") or _is_modelling(kind)]
    files = {kind.__module__ for kind in read} | _HELPERS
    left: list[Any] = [value for kind in read for value in vars(kind).values()]
    found: dict[int, tuple[dict[str, Any], set[str]]] = {}
    seen: set[int] = set()
    while left:
        function = function_of(left.pop())
        if function is None or id(function) in seen:
            continue
        if is_theirs(function) and function.__module__ not in files:
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
    """The function behind a method, a property, a partial; None for what has none."""
    for name in ("__func__", "fget", "func"):
        if type(value) is not FunctionType and not isinstance(value, type | nn.Module | Tensor):
            value = getattr(value, name, None) or value
    return value if type(value) is FunctionType else None


def _swapped(config: Any) -> dict[str, Any]:
    """What our attention and experts stand for, and functions of torch and hooks that act everywhere."""
    found = {
        "attention": ALL_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None)),
        "mask": ALL_MASK_ATTENTION_FUNCTIONS.get(getattr(config, "_attn_implementation", None)),
        "experts": ALL_EXPERTS_FUNCTIONS.get(getattr(config, "_experts_implementation", None)),
    }
    everywhere = torch_module._global_forward_pre_hooks, torch_module._global_forward_hooks
    return found | {f"hook {number}": hook for one in everywhere for number, hook in one.items()}


def _check(value: Any, deep: int, note: Any) -> Check:
    """Tells later whether a value is still what ``value`` is; keeps nothing of the model alive."""
    if type(value) in _PLAIN:
        return lambda now: type(now) is type(value) and (now == value or now != now and value != value)
    same = _identity(value, note)
    if isinstance(value, Tensor):
        return _check_tensor(value, same)
    if isinstance(value, np.ndarray):
        array = value.copy() if value.size <= _SMALL else None
        return lambda now: same(now) and (array is None or array.tobytes() == now.tobytes())
    if not deep or isinstance(value, PreTrainedConfig | type | ModuleType) or is_theirs(value):
        return same
    if isinstance(value, nn.Module):
        return _check_module(value, same, note)
    if isinstance(value, dict | list | tuple | deque) and len(value) > MOST:
        size = len(value)  # a table: nobody changes one entry of it
        return lambda now: same(now) and len(now) == size
    if isinstance(value, dict):
        inner = {key: _check(held, deep - 1, note) for key, held in value.items()}
        return lambda now: (
            isinstance(now, dict)
            and now.keys() == inner.keys()
            and all(check(now[key]) for key, check in inner.items())
        )
    if isinstance(value, list | tuple | deque):
        kind, checks = type(value), [_check(held, deep - 1, note) for held in value]
        return lambda now: (
            type(now) is kind
            and len(now) == len(checks)
            and all(check(held) for check, held in zip(checks, now, strict=True))
        )
    if isinstance(value, set | frozenset):
        known = frozenset(map(id, value)), len(value)
        return lambda now: same(now) and (frozenset(map(id, now)), len(now)) == known
    if isinstance(value, MethodType) and not isinstance(value.__self__, nn.Module):
        deep += 1  # an object is as near as its method; a module is looked into however far it lies
    checks = {key: _check(held, deep - 1, note) for key, held in parts(value).items()}

    def check(now: Any) -> bool:
        found = parts(now) if same(now) else {}
        return same(now) and found.keys() == checks.keys() and all(checks[key](found[key]) for key in checks)

    return check


def _check_tensor(value: Tensor, same: Check) -> Check:
    """Of a tensor that is no weight, such as a hook's vector: a program may hold it as a constant."""
    version = None if value.is_inference() else value._version
    own = type(value) not in (Tensor, nn.Parameter, nn.Buffer)  # a quantised one need not compare
    small = value.device.type == "cpu" and value.numel() <= _SMALL
    kept = value.detach().clone() if small and not own else None

    def check(now: Any) -> bool:
        if not same(now) or (None if now.is_inference() else now._version) != version:
            return False
        if kept is None or now.shape != kept.shape or now.dtype != kept.dtype:
            return kept is None
        return torch.equal(now, kept) or bool((now == kept).logical_or(now != now).all())

    return check


def _check_module(value: nn.Module, same: Check, note: Any) -> Check:
    """Of a module that is reached by a closure or an object: what it holds may be constants of a program."""

    def shown(part: nn.Module) -> dict[Any, Any]:
        own = {key: held for key, held in vars(part).items() if key not in IGNORED}
        hooks = dict(enumerate(hooks_of(part))) | {"class": type(part)}
        return own | part._parameters | part._buffers | part._modules | hooks

    def checked(held: Any) -> Check:
        return _identity(held, note) if isinstance(held, nn.Module) else _check(held, 1, note)

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


def _identity(value: Any, note: Any) -> Check:
    try:
        held = weakref.ref(value, note)
    except TypeError:  # a value that cannot be referred to weakly is small, or a collection
        return lambda now: now is value
    return lambda now: now is held() and now is not None
