"""The attributes of modules that may decide what text comes, described, and those that a forward writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from torch_dflash.target.describe import describe, digest
from torch_dflash.target.origins import is_authors
from torch_dflash.target.trace import run_otherwise

# No text depends on these, of a module or a config: modes, names, what only gradients or a loss read,
# defaults of `generate`, which outputs a forward returns, what a model card or a loader reads. What a
# vocabulary's size decides are shapes.
IGNORED = frozenset(
    "training gradient_checkpointing vocab_size padding_idx problem_type output_router_logits "
    "name_or_path architectures auto_map tokenizer_class transformers_version id2label label2id dtype "
    "torch_dtype bos_token_id eos_token_id pad_token_id use_cache output_attentions output_hidden_states "
    "return_dict rope_deltas model_tags main_input_name input_modalities output_modalities loss_type "
    "base_model_prefix supports_gradient_checkpointing _attn_implementation _is_hf_initialized "
    "_gradient_checkpointing_func hf_device_map hf_quantizer".split()
)
_BOOKKEEPING = frozenset(vars(nn.Module())) | set(dir(PreTrainedModel))
_OF_A_PASS = re.compile(r"(?<![A-Za-z])meta(?![A-Za-z])|torch\.dtype")
ABSENT, VARIES = object(), object()


class _Kind:
    """What is not looked into, by its type; two tensors of one dtype that can be read by their values too."""

    def __init__(self, value: Any):
        self._kind, self._value = type(value), value if isinstance(value, torch.Tensor) else None

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Kind) or self._kind is not other._kind:
            return False
        mine, theirs = self._value, other._value
        if mine is None or theirs is None or mine.dtype != theirs.dtype or mine.device != theirs.device:
            return True
        return digest(mine) == digest(theirs)

    def __hash__(self) -> int:
        return hash(self._kind)

    @property
    def is_tensor(self) -> bool:
        return self._value is not None


def says_something(name: str) -> bool:
    """Whether an attribute of this name may decide what text comes: torch's own private ones do not."""
    return name not in IGNORED and not (name.startswith("_") and name in _BOOKKEEPING)


def attributes(module: nn.Module, added: Iterable[str] = ()) -> list[tuple[str, Any, Hashable]]:
    """A module's own attributes that may decide something: names, values, descriptions; ``added``: absent."""
    return [
        (name, value, describe(value, _Kind))
        for name, value in (dict.fromkeys(added, ABSENT) | vars(module)).items()
        if says_something(name) and not isinstance(value, PreTrainedConfig | GenerationConfig)
    ]


def is_as_described(value: Any, description: Hashable) -> bool:
    """Whether a value is what `attributes` or `written_in` have described."""
    return describe(value, _Kind) == description


def written_in(
    skeleton: nn.Module, tried: nn.Module, build: Callable[[], nn.Module]
) -> dict[tuple[str, str], Any]:
    """What the first forward of ``tried``, built as ``skeleton`` was, has written, by module and name.

    A constant is described, and so is a tensor. What a further one from ``build`` has otherwise after other
    forwards is `VARIES`, and so are other objects that are not looked into, and what names the meta device or
    a type.
    """
    before, once = _descriptions(skeleton), _descriptions(tried)
    changed = {key for key in once if once[key] != before.get(key)}
    same = {key for key in changed if not _is_opaque(once[key]) and not _OF_A_PASS.search(repr(once[key]))}
    if not same and not any(is_authors(type(module)) for module in tried.modules()):
        return dict.fromkeys(changed, VARIES)
    other = build()
    try:
        for _ in run_otherwise(other):
            told = _descriptions(other)
            same = {key for key in same if told.get(key) == once[key]}
            changed |= {key for key in told if told[key] != before.get(key)}
    except Exception:  # nothing that the first one asked for
        return dict.fromkeys(changed, VARIES)
    return {key: once[key] if key in same else VARIES for key in changed}


def _is_opaque(description: Hashable) -> bool:
    return type(description) is _Kind and not description.is_tensor


def _descriptions(module: nn.Module) -> dict[tuple[str, str], Hashable]:
    return {
        (name, key): description
        for name, inner in module.named_modules()
        for key, _, description in attributes(inner)
    }
