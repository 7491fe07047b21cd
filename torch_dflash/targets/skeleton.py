"""A module without weights: built on the meta device from a copied config, filled by a parameter tree."""

from __future__ import annotations

import copy
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from operator import itemgetter
from typing import Any

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.targets.describe import describe, digest
from torch_dflash.targets.experts import EXPERTS
from torch_dflash.targets.forgetting import TORCHS
from torch_dflash.targets.origins import is_authors

ATTENTION = "grouped_rows"  # a name with "flash" in it would make transformers look for flash-attn
_memory: ContextVar[Any] = ContextVar("memory")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_building = threading.RLock()


@contextmanager
def remembered_in(cache: Any) -> Iterator[None]:
    """While open, attention of a skeleton is ``cache.attend(layer, rows, mask, what else it is given)``."""
    token = _memory.set(cache)
    try:
        yield
    finally:
        _memory.reset(token)


def _attention(module, query, key, value, attention_mask=None, scaling=None, **more):
    """transformers' attention interface: [B, Q, M, D] -> [B, M, Q, Dv].

    The mask is read while a target is traced (`torch_dflash.targets.trace`); after that the cache knows
    what it said. Windows too are taken from there: some models put theirs into the mask alone.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    given = {"sinks": more.get("s_aux"), "softcap": more.get("softcap")}
    if more.get("is_causal") is None:  # as transformers' sdpa reads it
        more["is_causal"] = getattr(module, "is_causal", True)
    cache = _memory.get()
    inputs = AttentionInputs(query, key, value, cache.start, scale, **given)
    return cache.attend(module.layer_idx, inputs, attention_mask, more).contiguous(), None


def _mask(*, q_length, kv_length, mask_function, **_):
    """transformers' mask interface, called while a target is traced: no mask is made, its rule is kept."""
    return _memory.get().make_mask(mask_function, q_length, kv_length)


ALL_ATTENTION_FUNCTIONS.register(ATTENTION, _attention)
ALL_MASK_ATTENTION_FUNCTIONS.register(ATTENTION, _mask)


def build_skeleton(model: PreTrainedModel, attention: str = ATTENTION) -> PreTrainedModel:
    """The model's architecture on the meta device, with our attention and static-shape experts.

    The user's module and its config are not touched.
    """
    config = copy.deepcopy(model.config)
    config._attn_implementation = attention
    for part in (config, config.get_text_config()):
        part.output_router_logits = False  # a traced forward has none
    if getattr(model, "_can_set_experts_implementation", lambda: False)():
        config._experts_implementation = EXPERTS
    dtypes = _defaults(model)
    if len(dtypes) == 1:
        return _construct(type(model), config, dtypes[0])
    return _most_alike(model, config, dtypes)


def _defaults(model: PreTrainedModel) -> list[torch.dtype]:
    """The default dtypes that the model may have been built under, the likeliest first.

    Of transformers' own classes hardly one asks, so the process's own comes first. An author's may ask in
    a way that cannot be seen: a model of the dtype that its config names was most likely loaded in it.
    """
    with _building:
        usual = torch.get_default_dtype()
    named = getattr(model.config, "dtype", None)
    loaded = named == model.dtype and any(is_authors(type(module)) for module in model.modules())
    asked = (named, usual) if loaded else (usual, named, model.dtype)
    return list(dict.fromkeys(dtype for dtype in asked if dtype in _FLOATS))


def _most_alike(model: PreTrainedModel, config: Any, dtypes: list[torch.dtype]) -> PreTrainedModel:
    """Of the skeletons under each default dtype the one whose attributes are most like the model's."""
    noted, found, errors = _notes(model), [], []
    for dtype in dtypes:
        try:
            skeleton = _construct(type(model), config, dtype)
        except (TypeError, ValueError) as error:  # of this dtype, perhaps
            errors.append(error)
            continue
        other = sum(noted.get(key) != described for key, described in _notes(skeleton).items())
        if not other:
            return skeleton
        found.append((other, skeleton))
    if not found:
        raise errors[0]
    return min(found, key=itemgetter(0))[1]


def _construct(kind: type, config: Any, dtype: torch.dtype) -> PreTrainedModel:
    """A model as `from_pretrained` makes one of this dtype: constructors note the default that they find.

    Other threads see a default as well, so it is set only where it is another.
    """
    try:
        with _building, torch.device("meta"):
            before = torch.get_default_dtype()
            if dtype != before:
                torch.set_default_dtype(dtype)
            try:
                return kind(copy.deepcopy(config)).eval().requires_grad_(False)
            finally:
                if torch.get_default_dtype() != before:
                    torch.set_default_dtype(before)
    except KeyError as error:
        raise ValueError(
            f"target={kind.__name__}: it knows no attention implementation but its own "
            f"({error}), so that cannot be swapped; use a model with transformers' attention interface."
        ) from error
    except Exception as error:  # a class that is not known may do anything
        raise TypeError(
            f"{kind.__name__} cannot be built from its config alone ({error}); pass a model whose "
            "class takes just a config, as those of transformers do."
        ) from error


def _notes(model: PreTrainedModel) -> dict[tuple[str, str], Any]:
    """All modules' classes and the names of their buffers, and their attributes, described."""
    found = {}
    for name, module in model.named_modules():
        found[name, ""] = type(module), tuple(module._buffers)
        for key, value in vars(module).items():
            if key not in TORCHS and not isinstance(value, PreTrainedConfig):
                found[name, key] = describe(value, _sketch)
    return found


def _sketch(value: Any) -> Any:
    """What is not looked into: a tensor by dtype, shape and readable numbers; the limits of a dtype."""
    if isinstance(value, torch.Tensor):
        return type(value), repr(value.dtype), tuple(value.shape), digest(value)
    return repr(value) if isinstance(value, torch.finfo | torch.iinfo) else type(value)
