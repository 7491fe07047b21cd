"""What is odd about a pair that fits (`torch_dflash.proposers.pair`): legal, and worth a word."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoTokenizer
from transformers.utils import cached_file

from torch_dflash.checks import INT32_MAX
from torch_dflash.proposers.dflash.config import default_target_layer_ids
from torch_dflash.proposers.facts import TargetFacts, elsewhere, facts_of
from torch_dflash.proposers.pair import tables_of_ids

# Of each drafter the notes that were given: one engine is built after another for the same pair.
_told: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class Finding:
    """A field that looks odd; not refused, for it may be meant."""

    field: str
    value: Any
    words: str

    def __str__(self) -> str:
        return f"note: {self.field}={self.value}: {self.words}"


def findings(target: Any, drafter: Any) -> list[Finding]:
    """Odd fields of a pair that fits; arguments as `pair.check_pair` takes them."""
    config = getattr(drafter, "config", drafter)
    return _findings(facts_of(target), config, None if config is drafter else drafter.dtype)


def warn_once(target: Any, drafter: Any) -> None:
    """Warn of what is odd about a pair that fits; of each drafter nothing is said twice.

    Args:
        target: as `facts_of` takes it, or its facts. drafter: a `DFlashDraftModel`.
    """
    facts = target if isinstance(target, TargetFacts) else facts_of(target)
    _say(drafter, [one for one in _findings(facts, drafter.config, drafter.dtype) if one.value is not None])


def warn_of_tokenizer(source: str, drafter: Any, hub: dict[str, Any]) -> None:
    """The same of the mask token and the tokenizer of the target in ``source``, fetched as ``hub`` says."""
    _say(drafter, _of_tokenizer(source, drafter.config.mask_token_id, elsewhere(hub)))


def _say(drafter: Any, odd: list[Finding]) -> None:
    said = _told.setdefault(drafter, set())
    for note in map(str, odd):
        if note not in said:
            said.add(note)
            warnings.warn(note, stacklevel=2)


def _findings(facts: TargetFacts, config: Any, dtype: torch.dtype | None) -> list[Finding]:
    return [
        *_vocabulary(facts, config),
        *_taps(facts, config),
        *_positions(facts, config),
        *_window(config),
        *_dtype(facts, dtype),
        *_mask(facts, config),
    ]


def _vocabulary(facts: TargetFacts, config: Any) -> Iterator[Finding]:
    if config.vocab_size not in (None, 0, facts.vocab):
        tables = ", ".join(tables_of_ids(config))
        drafts = f"by the drafter's {tables} no id that only one of the two has is drafted"
        drafts = drafts if tables else "the drafter has no table of ids, so it drafts all the same"
        words = f"the target's is {facts.vocab}; {drafts}. Check that both have the same tokenizer."
        yield Finding("vocab_size", config.vocab_size, words)


def _taps(facts: TargetFacts, config: Any) -> Iterator[Finding]:
    taps, layers = config.target_layer_ids, facts.layers
    usual = default_target_layer_ids(layers, len(taps)) if layers > 3 else taps
    if taps == [tap + 1 for tap in usual]:
        words = (
            f"one more than the usual {usual}: other layouts count from the embedding, this one does not; "
            "take one off each if they are from such a file."
        )
        yield Finding("target_layer_ids", taps, words)
    if taps != sorted(set(taps)):
        yield Finding(
            "target_layer_ids",
            taps,
            "not in order, or twice the same: fc's columns follow this list; set the order of its training.",
        )
    if layers - 1 in taps:
        yield Finding(
            "target_layer_ids",
            taps,
            "the last block is read before the final norm, as the others; train it anew if it learned "
            "from normed states.",
        )
    if config.num_target_layers is None:
        words = "absent: nothing tells a target with other layers from this; set the target's."
        yield Finding("num_target_layers", None, words)


def _positions(facts: TargetFacts, config: Any) -> Iterator[Finding]:
    if facts.rope not in (None, config.rope_parameters):
        words = (
            f"the target has {facts.rope}; drafters mostly turn as their target does: set that, unless "
            "it was trained with its own."
        )
        yield Finding("rope_parameters", config.rope_parameters, words)
    if config.max_position_embeddings < facts.context < INT32_MAX:
        words = (
            f"the target has {facts.context}: no engine is built for more than the smaller; raise it if "
            "the drafter was trained on longer texts."
        )
        yield Finding("max_position_embeddings", config.max_position_embeddings, words)


def _window(config: Any) -> Iterator[Finding]:
    sliding = "sliding_attention" in config.layer_types
    if config.sliding_window and not sliding:
        words = (
            "no layer of layer_types slides, so it is not heeded; drafters trained with a window need it: "
            "name those layers sliding_attention."
        )
        yield Finding("sliding_window", config.sliding_window, words)
    if sliding and config.sliding_window < config.block_size:
        words = (
            f"less than the block of {config.block_size}: its last rows do not see the anchor; set the one "
            "it was trained with."
        )
        yield Finding("sliding_window", config.sliding_window, words)


def _dtype(facts: TargetFacts, dtype: torch.dtype | None) -> Iterator[Finding]:
    if dtype == torch.float16:
        words = "float16 overflows where drafters were trained in bfloat16; pass dtype=torch.bfloat16."
        yield Finding("dtype", dtype, words)
    elif None not in (dtype, facts.dtype) and dtype != facts.dtype:
        words = (
            f"the target is in {facts.dtype}: its features are cast to the drafter's type; load both in "
            f"{facts.dtype}, or both in {dtype}."
        )
        yield Finding("dtype", dtype, words)


def _mask(facts: TargetFacts, config: Any) -> Iterator[Finding]:
    if config.mask_token_id in facts.stops:
        words = "is a stop id of the target; a mask is mostly an id that no text holds: set the trained one."
        yield Finding("mask_token_id", config.mask_token_id, words)


def mask_in_texts(tokenizer: Any, mask: int) -> list[Finding]:
    """Whether the mask is a token that texts hold: neither special nor beyond the tokenizer's vocabulary."""
    if mask >= len(tokenizer) or mask in tokenizer.all_special_ids:
        return []
    added = getattr(tokenizer, "added_tokens_decoder", {}).get(mask)
    if added is not None and added.special:
        return []
    token = tokenizer.convert_ids_to_tokens(mask)
    words = f"is the token {token!r}; a mask is mostly one that no text holds: set the trained one."
    return [Finding("mask_token_id", mask, words)]


def _of_tokenizer(source: str, mask: int, hub: dict[str, Any]) -> list[Finding]:
    absent_is_none: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False} | hub
    try:
        if not any(cached_file(source, name, **absent_is_none) for name in TOKENIZERS):
            raise FileNotFoundError(source)  # of some families transformers would make an empty one up
        tokenizer = AutoTokenizer.from_pretrained(source, **hub)
    except (OSError, ValueError, KeyError, TypeError, ImportError) as error:
        words = (
            f"not compared with the tokenizer of {source}, which cannot be read ({type(error).__name__}); "
        )
        words += "fetch its files too."
        return [Finding("mask_token_id", mask, words)]
    return mask_in_texts(tokenizer, mask)
