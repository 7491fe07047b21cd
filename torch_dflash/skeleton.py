"""A module without weights: built on the meta device from a copied config, filled by a parameter tree."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from torch_dflash.attention import Rows
from torch_dflash.experts import EXPERTS
from torch_dflash.unmodified import check_unmodified

ATTENTION = "grouped_rows"  # a name with "flash" in it would make transformers look for flash-attn
_memory: ContextVar[Any] = ContextVar("memory")


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

    The mask is read while a target is traced (`torch_dflash.tracing`); after that the cache knows what it
    said. Windows too are taken from there: some models put theirs into the mask alone.
    """
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    rows = Rows(query, key, value, scale, sinks=more.get("s_aux"), softcap=more.get("softcap"))
    return _memory.get().attend(module.layer_idx, rows, attention_mask, more).contiguous(), None


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
    try:
        with torch.device("meta"):
            skeleton = type(model)(config)
    except KeyError as error:
        raise ValueError(
            f"target={type(model).__name__}: it knows no attention implementation but its own "
            f"({error}), so that cannot be swapped; use a model with transformers' attention interface."
        ) from error
    except TypeError as error:
        raise TypeError(
            f"{type(model).__name__} cannot be built from its config alone ({error}); pass a model whose "
            "class takes just a config, as those of transformers do."
        ) from error
    return skeleton.eval().requires_grad_(False)


def collect_tensors(skeleton: nn.Module, model: nn.Module, prefix: str) -> dict[str, Tensor]:
    """The live tensors of ``model`` under the skeleton's names, each tied weight once.

    Raises:
        ValueError: the model's tensors are not those its config describes (an adapter, a quantiser or
            surgery changed them), so running the skeleton would not be running the model.
    """
    live = dict(model.named_parameters(remove_duplicate=False))
    live |= dict(model.named_buffers(remove_duplicate=False))
    slots = list(skeleton.named_parameters(remove_duplicate=False))
    slots += list(skeleton.named_buffers(remove_duplicate=False))
    extra = live.keys() - {name for name, _ in slots}
    if extra:
        raise ValueError(
            f"{type(model).__name__}: unknown parameters or buffers {sorted(extra)[:3]}; merge adapters "
            "(merge_and_unload()) before passing the model."
        )
    check_unmodified(skeleton, model)
    taken: dict[int, Tensor] = {}
    tensors = {}
    for name, slot in slots:
        tensor = live.get(name)
        if tensor is None or tensor.shape != slot.shape:
            found = "no such tensor" if tensor is None else f"shape {tuple(tensor.shape)}"
            raise ValueError(
                f"{type(model).__name__}: {name} should have shape {tuple(slot.shape)} by the model's "
                f"config, found {found}. Merge adapters and dequantise before passing the model."
            )
        if tensor.device.type == "meta":
            raise ValueError(
                f"{type(model).__name__}: {name} is on the meta device; load the weights before decoding."
            )
        if id(slot) not in taken:
            taken[id(slot)] = tensors[prefix + name] = tensor
        elif taken[id(slot)].data_ptr() != tensor.data_ptr():
            equal = torch.equal(taken[id(slot)], tensor)
            raise ValueError(
                f"{type(model).__name__}: {name} is tied by the config (tie_word_embeddings=True) but holds "
                + (
                    "a copy of the same values (load_state_dict(assign=True) leaves that); call "
                    "model.tie_weights()."
                    if equal
                    else "its own weight; set tie_word_embeddings=False on the config, or tie the weights."
                )
            )
    return tensors
