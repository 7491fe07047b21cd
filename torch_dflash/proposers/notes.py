"""Warnings about valid but unusual drafter configs."""

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
from torch_dflash.proposers.pair import TargetFacts, elsewhere, facts_of, tables_of_ids

# Notes given for each drafter: several engines may be built for one pair.
_warned: weakref.WeakKeyDictionary[Any, set[str]] = weakref.WeakKeyDictionary()
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model")


@dataclass(frozen=True)
class Finding:
    """An unusual field, which may be intended."""

    field: str
    value: Any
    words: str

    def __str__(self) -> str:
        return f"note: {self.field}={self.value}: {self.words}"


def findings(target: Any, drafter: Any) -> list[Finding]:
    """Unusual fields of a pair that fits; arguments as of `pair.check_pair`."""
    config = getattr(drafter, "config", drafter)
    return _findings(facts_of(target), config, None if config is drafter else drafter.dtype)


def warn_once(target: Any, drafter: Any) -> None:
    """Warn of the unusual fields of a pair that fits, of each once a drafter.

    Args:
        target: as `facts_of` takes it, or its facts. drafter: a `DFlashDraftModel`.
    """
    facts = target if isinstance(target, TargetFacts) else facts_of(target)
    _warn(drafter, [one for one in _findings(facts, drafter.config, drafter.dtype) if one.value is not None])


def warn_of_tokenizer(source: str, drafter: Any, hub: dict[str, Any]) -> None:
    """Warn once of a mask token that is text to the tokenizer of ``source``; ``hub``: how to fetch it."""
    _warn(drafter, _of_tokenizer(source, drafter.config.mask_token_id, elsewhere(hub)))


def _warn(drafter: Any, odd: list[Finding]) -> None:
    warned = _warned.setdefault(drafter, set())
    for note in map(str, odd):
        if note not in warned:
            warned.add(note)
            warnings.warn(note, stacklevel=2)


def _findings(facts: TargetFacts, config: Any, dtype: torch.dtype | None) -> list[Finding]:
    found = _taps(facts, config)
    if config.vocab_size not in (None, 0, facts.vocab):
        tables = ", ".join(tables_of_ids(config))
        drafts = (
            f"ids without a row in its {tables} are never drafted" if tables else "it has no table of ids"
        )
        words = f"the target's is {facts.vocab}; {drafts}. Check that both have the same tokenizer."
        found.insert(0, Finding("vocab_size", config.vocab_size, words))
    if facts.rope not in (None, config.rope_parameters):
        words = f"the target has {facts.rope}; drafters mostly turn as their target does: set that."
        found.append(Finding("rope_parameters", config.rope_parameters, words))
    if config.max_position_embeddings < facts.context < INT32_MAX:
        words = f"the target has {facts.context}; no engine is built for more than the smaller: raise it."
        found.append(Finding("max_position_embeddings", config.max_position_embeddings, words))
    return [*found, *_window(config), *_dtype(facts, dtype), *_mask(facts, config)]


def _taps(facts: TargetFacts, config: Any) -> list[Finding]:
    taps, layers = config.target_layer_ids, facts.layers
    usual = default_target_layer_ids(layers, len(taps)) if layers > 3 else taps
    words = {
        f"one more than the usual {usual}: ids are 0-based block indices here; lower each by 1 "
        "if they count it.": taps == [tap + 1 for tap in usual],
        "not in order, or twice the same: fc's columns follow this list; set the order of its training.": (
            taps != sorted(set(taps))
        ),
        "the last block is read before the final norm; train it anew if it learned from normed states.": (
            layers - 1 in taps
        ),
    }
    found = [Finding("target_layer_ids", taps, text) for text, odd in words.items() if odd]
    if config.num_target_layers is None:
        words = "absent: a target with other layers cannot be told from this one; set the target's."
        found.append(Finding("num_target_layers", None, words))
    return found


def _window(config: Any) -> Iterator[Finding]:
    window, sliding = config.sliding_window, "sliding_attention" in config.layer_types
    if window and not sliding:
        words = (
            "not heeded: no layer slides; if it was trained with one, name those layers sliding_attention."
        )
        yield Finding("sliding_window", window, words)
    if sliding and window < config.block_size:
        words = f"less than the block of {config.block_size}; set the one it was trained with."
        yield Finding("sliding_window", window, words)


def _dtype(facts: TargetFacts, dtype: torch.dtype | None) -> Iterator[Finding]:
    if dtype == torch.float16:
        words = "float16 overflows where drafters were trained in bfloat16; pass dtype=torch.bfloat16."
        yield Finding("dtype", dtype, words)
    elif None not in (dtype, facts.dtype) and dtype != facts.dtype:
        words = (
            f"the target is in {facts.dtype}, its features are cast; load both in {facts.dtype} or {dtype}."
        )
        yield Finding("dtype", dtype, words)


def _mask(facts: TargetFacts, config: Any) -> Iterator[Finding]:
    if getattr(config, "mask_token_id", None) in facts.stops:
        words = "is a stop id of the target; a mask is mostly an id that no text holds: set the trained one."
        yield Finding("mask_token_id", config.mask_token_id, words)


def mask_in_texts(tokenizer: Any, mask: int) -> list[Finding]:
    """A finding where the mask is a token of texts: neither special nor beyond the tokenizer's vocabulary."""
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
        why = f"which cannot be read ({type(error).__name__})"
        words = f"not compared with the tokenizer of {source}, {why}; fetch its files too."
        return [Finding("mask_token_id", mask, words)]
    return mask_in_texts(tokenizer, mask)
