"""A structural copy of a live model: modules, hooks and attributes, with empty tensors for its weights."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from operator import is_
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.targets.closure_values import cells_of
from torch_dflash.targets.experts import EXPERTS
from torch_dflash.targets.hooks import WeakHook, hooks_of
from torch_dflash.targets.latents import attend_latents

ATTENTION = "grouped_rows"  # a name with "flash" in it would make transformers look for flash-attn
MOST_SHARED = 8
"""Most attempts to copy a model; each shares the values that did not copy before."""
_current: ContextVar[Any] = ContextVar("cache")


@contextmanager
def using_cache(cache: Any) -> Iterator[None]:
    """While open, a skeleton's attention calls ``cache.attend(layer, rows, mask, other arguments)``."""
    token = _current.set(cache)
    try:
        yield
    finally:
        _current.reset(token)


def _attention(module, query, key, value, attention_mask=None, scaling=None, **more):
    """transformers' attention interface: [B, Q, M, D] -> [B, M, Q, Dv].

    The trace (`torch_dflash.targets.trace`) reads masks; later passes use the windows that it found, which
    some models have in the mask alone.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    given: Any = {"sinks": more.get("s_aux"), "softcap": more.get("softcap")}
    if more.get("is_causal") is None:  # as in transformers' sdpa
        more["is_causal"] = getattr(module, "is_causal", True)
    cache = _current.get()
    inputs = AttentionInputs(query, key, value, cache.start, scale, **given)

    def attend(inputs: AttentionInputs) -> Tensor:
        return cache.attend(module.layer_idx, inputs, attention_mask, more)

    out = attend_latents(module, inputs, attend, partial(cache.expands, module.layer_idx))
    return (attend(inputs) if out is None else out).contiguous(), None


def _mask(*, q_length, kv_length, mask_function, **_):
    """transformers' mask interface, called in a trace: records the rule and makes no mask."""
    return _current.get().make_mask(mask_function, q_length, kv_length)


def current_cache() -> Any:
    """The cache of the running forward (`using_cache`)."""
    return _current.get()


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)


def build_skeleton(model: PreTrainedModel, attention: str = ATTENTION) -> Any:
    """A copy of the live model's structure on the meta device, with our attention and static-shape experts.

    Includes adapters, hooks, replaced modules and attributes; a function in an attribute that closes over
    modules of the model (``own = layer.forward``) closes over those of the copy. Parameters and buffers are
    empty tensors; tied ones stay tied. Hooks, and tensors in attributes, are shared with the model, which
    does not change.

    Raises:
        TypeError: the model cannot be copied.
    """
    memo: dict[int, Any] = {}
    for tensor in {id(leaf): leaf for leaf in [*model.parameters(), *model.buffers()]}.values():
        # A quantised tensor's class need not support the meta device; its shape and dtype suffice.
        empty = torch.empty(tensor.shape, dtype=tensor.dtype, device="meta")
        kept = isinstance(tensor, nn.Parameter)
        memo[id(tensor)] = nn.Parameter(empty, requires_grad=False) if kept else empty
    own_modules = dict.fromkeys(map(id, model.modules()))
    for hook in (hook for module in model.modules() for hook in hooks_of(module)):
        # A user may control a hook by its object: a copy of the object would miss later changes.
        if id(getattr(hook, "__self__", None)) not in own_modules:
            memo[id(hook)] = WeakHook(hook) if getattr(type(hook), "__weakrefoffset__", 0) else hook
    skeleton = _copied(model, memo).eval()
    experts = takes_experts(model)
    twins = dict(zip(own_modules, skeleton.modules(), strict=True))
    for module in skeleton.modules():
        for name, value in vars(module).items():
            if isinstance(value, FunctionType):
                vars(module)[name] = _rebound(value, twins)
    for config in configs_of(skeleton):
        config._attn_implementation = attention
        for part in (config, config.get_text_config()):
            part.output_router_logits = False  # a traced forward has none
        if experts:
            config._experts_implementation = EXPERTS
    return skeleton


def takes_experts(model: nn.Module) -> bool:
    """Whether some part of ``model`` supports another implementation of experts.

    transformers asks the class's own module, but the experts of a wrapper (such as Kimi-K2.5's) are in the
    module of its language model.
    """
    parts = (one for one in model.modules() if isinstance(one, PreTrainedModel))
    return any(one._can_set_experts_implementation() for one in parts)


def _rebound(value: Any, twins: dict[int, Any]) -> Any:
    """``value``, or a copy with ``twins`` (by id) if it contains or closes over modules of a model."""
    if id(value) in twins:
        return twins[id(value)]
    twins = twins | {id(value): value}  # it may contain itself
    if isinstance(value, MethodType):
        parts: Any = [value.__func__, value.__self__]
    elif isinstance(value, FunctionType):
        held = [cell.cell_contents for cell in cells_of(value).values()]
        parts = [*held, value.__defaults__, value.__kwdefaults__]
    elif type(value) in (dict, list, tuple):
        parts = _values(value)
    else:
        return value
    new = [_rebound(one, twins) for one in parts]
    if all(map(is_, parts, new)):
        return value
    if isinstance(value, MethodType):
        return MethodType(*new)
    if isinstance(value, FunctionType):
        return _with_parts(value, new, twins)
    return type(value)(zip(value, new, strict=True) if isinstance(value, dict) else new)


def _with_parts(function: FunctionType, parts: list[Any], twins: dict[int, Any]) -> FunctionType:
    held = iter(parts)
    cells = [cell if cell == CellType() else CellType(next(held)) for cell in function.__closure__ or ()]
    defaults, more = held
    code, space, name = function.__code__, function.__globals__, function.__name__
    copied = FunctionType(code, space, name, defaults, tuple(cells))
    copied.__kwdefaults__ = more
    vars(copied).update({key: _rebound(one, twins) for key, one in vars(function).items()})
    return copied


def configs_of(model: nn.Module) -> list[Any]:
    """The configs of ``model`` and its modules, each once, the model's own first."""
    held = [value for module in model.modules() for value in vars(module).values()]
    return list({id(one): one for one in held if isinstance(one, PreTrainedConfig)}.values())


class _Shared(TorchFunctionMode):
    """While open, a deep copy shares all tensors that are not in its memo."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        return args[0] if func is Tensor.__deepcopy__ else func(*args, **(kwargs or {}))


def _copied(model: Any, memo: dict[int, Any]) -> Any:
    """A deep copy; values that do not copy, such as locks or Python modules, are shared with the model."""
    with torch.no_grad(), torch.inference_mode(False), _Shared():
        for _ in range(MOST_SHARED):
            try:
                return copy.deepcopy(model, dict(memo))
            except Exception as error:
                own = set(map(id, model.modules()))
                shared = [one for module in model.modules() for one in _uncopyable(vars(module), memo, own)]
                if not shared:
                    raise TypeError(
                        f"target={type(model).__name__} cannot be copied ({type(error).__name__}: {error})."
                    ) from error
                memo |= {id(one): one for one in shared}
        raise TypeError(
            f"target={type(model).__name__} holds more than {MOST_SHARED} values that do not copy."
        )


def _uncopyable(value: Any, memo: dict[int, Any], own: set[int]) -> list[Any]:
    """The innermost parts of ``value`` that do not copy, without modules of the model (``own``, by id)."""
    if isinstance(value, type | ModuleType):
        return []
    many = isinstance(value, dict | list | tuple)
    found = []
    for part in _values(value if many else getattr(value, "__dict__", {})):
        if id(part) in own or id(part) in memo:
            continue
        try:
            copy.deepcopy(part, dict(memo))
        except Exception:
            inner = _uncopyable(part, memo, own)
            held = isinstance(part, dict | list | tuple) and any(id(one) in own for one in _values(part))
            found += inner or ([] if held else [part])
    return found


def _values(part: Any) -> list[Any]:
    return list(part.values() if isinstance(part, dict) else part)
