"""The attributes of modules that may decide what text comes, described, and those that a forward writes."""

from __future__ import annotations

import re
from collections.abc import Callable, Hashable, Iterable
from functools import reduce
from typing import Any

import torch
from torch import nn
from transformers import GenerationConfig, PreTrainedConfig, PreTrainedModel

from torch_dflash.targets.describe import describe, digest
from torch_dflash.targets.origins import is_authors
from torch_dflash.targets.trace import run_otherwise

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
_META = re.compile(r"(?<![A-Za-z])meta(?![A-Za-z])")
ABSENT, VARIES, LONGER = object(), object(), object()
_LARGE = 10_000


class _Kind:
    """What is not looked into, by its type; tensors by dtype, and by value if both can be read."""

    def __init__(self, value: Any):
        self._kind, self._value = type(value), value if isinstance(value, torch.Tensor) else None

    def __eq__(self, other: Any) -> bool:
        if not isinstance(other, _Kind) or self._kind is not other._kind:
            return False
        mine, theirs = self._value, other._value
        if mine is None or theirs is None:
            return True
        if mine.dtype != theirs.dtype or mine.device != theirs.device:
            return mine.dtype == theirs.dtype
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
    return [(name, value, describe(value, _Kind)) for name, value in _deciding(module, added)]


def _deciding(module: nn.Module, added: Iterable[str] = ()) -> list[tuple[str, Any]]:
    return [
        (name, value)
        for name, value in (dict.fromkeys(added, ABSENT) | vars(module)).items()
        if says_something(name) and not isinstance(value, PreTrainedConfig | GenerationConfig)
    ]


def is_as_described(value: Any, description: Hashable) -> bool:
    """Whether a value is what `attributes` or `written_in` have described."""
    return _fits(describe(value, _Kind), description)


def written_in(
    skeleton: nn.Module, tried: nn.Module, build: Callable[[], nn.Module]
) -> dict[tuple[str, str], Any]:
    """What forwards of ``tried``, built as ``skeleton`` was, and of a further one write, by module and name.

    A constant is described, and so is a tensor. The parts of a value that other forwards have otherwise are
    `VARIES`, and so are other objects that are not looked into, and a value with a word in it that names the
    meta device. What is large, and the first forward leaves alone, is taken for a table.
    """
    before, once = _descriptions(skeleton), _descriptions(tried)
    changed = {key for key in once if once[key] != before.get(key)}
    seen = [once]
    if changed or any(is_authors(type(module)) for module in tried.modules()):
        other, large = build(), {key for key in before.keys() - changed if _is_large(before[key])}
        ended = False
        for whole in run_otherwise(other):
            ended |= whole
            seen.append(_descriptions(other, large))
            changed |= {key for key in seen[-1] if seen[-1][key] != before.get(key)}
        if not ended:  # nothing to tell a constant by
            return dict.fromkeys(changed, VARIES)
    passing = {key for key in changed if any(_META.search(repr(told.get(key))) for told in seen)}
    written = dict.fromkeys(passing, VARIES) | {
        key: reduce(_common, (_lasting(told.get(key, ABSENT)) for told in seen)) for key in changed - passing
    }
    # A collection that only an uncommon pass makes longer may hold settings beside: changed, it is refused.
    kept = {key for key in before if once.get(key) == before[key]}
    return {key: told for key, told in written.items() if key not in kept or not _hides(told)}


def _fits(found: Hashable, pattern: Hashable) -> bool:
    if pattern is VARIES or pattern is LONGER or found == pattern:
        return True
    if type(found) is not tuple or type(pattern) is not tuple or len(found) != len(pattern):
        return False
    return all(map(_fits, found, pattern))


def _common(one: Hashable, other: Hashable) -> Hashable:
    """What two descriptions say alike, part by part."""
    if one == other:
        return one
    if type(one) is not tuple or type(other) is not tuple or LONGER in (one, other):
        return LONGER if LONGER in (one, other) else VARIES
    if len(one) != len(other):
        return LONGER if one and other else VARIES  # what is empty hides nothing
    # A number, a word: of any kind, if it varies.
    return VARIES if _is_constant(one) else tuple(map(_common, one, other))


def _hides(description: Hashable) -> bool:
    """Whether a collection in it is of any length, so that nothing is said of its parts."""
    return description is LONGER or type(description) is tuple and any(map(_hides, description))


def _is_constant(description: Hashable) -> bool:
    return type(description) is tuple and isinstance(next(iter(description), None), type)


def _lasting(description: Hashable) -> Hashable:
    """A description without what is a pass's own."""
    if type(description) is tuple:
        return tuple(map(_lasting, description))
    return VARIES if _is_opaque(description) else description


def _is_opaque(description: Hashable) -> bool:
    return type(description) is _Kind and not description.is_tensor


def _is_large(description: Hashable) -> bool:
    left, seen = [description], 0
    while left and seen < _LARGE:
        held = left.pop()
        seen += 1
        left += held if type(held) is tuple else ()
    return seen == _LARGE


def _descriptions(module: nn.Module, without: Iterable[Any] = ()) -> dict[tuple[str, str], Hashable]:
    return {
        (name, key): describe(value, _Kind)
        for name, inner in module.named_modules()
        for key, value in _deciding(inner)
        if (name, key) not in without
    }
