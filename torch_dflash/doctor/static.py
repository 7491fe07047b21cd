"""What two configs say of each other, beyond what is refused when a pair is built."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from torch_dflash.doctor.convention import as_text
from torch_dflash.proposers.dflash.config import default_target_layer_ids
from torch_dflash.proposers.dflash.model import DFlashDraftModel


@dataclass(frozen=True)
class Finding:
    """A field that looks odd; not refused, for it may be meant."""

    field: str
    value: Any
    words: str

    def __str__(self) -> str:
        return f"note: {self.field}={self.value}: {self.words}"


def findings(target: Any, drafter: DFlashDraftModel) -> list[Finding]:
    """Odd fields of a pair that fits (`torch_dflash.proposers.choose.check_pair`)."""
    return [*_taps(target, drafter), *_positions(target, drafter), *_numbers(target, drafter)]


def _taps(target: Any, drafter: DFlashDraftModel) -> Iterator[Finding]:
    taps, layers = drafter.config.target_layer_ids, target.config.get_text_config().num_hidden_layers
    usual = default_target_layer_ids(layers, len(taps)) if layers > 3 else taps
    if taps == [tap + 1 for tap in usual]:
        words = f"one more than the usual {usual}: other layouts count from the embedding, this one does not."
        yield Finding("target_layer_ids", taps, words)
    if taps != sorted(set(taps)):
        yield Finding(
            "target_layer_ids", taps, "not in order, or twice the same: fc's columns follow this list."
        )
    if layers - 1 in taps:
        yield Finding(
            "target_layer_ids", taps, "the last block is read before the final norm, as the others."
        )
    if drafter.config.num_target_layers is None:
        yield Finding(
            "num_target_layers", None, "absent: nothing tells a target with other layers from this."
        )


def _positions(target: Any, drafter: DFlashDraftModel) -> Iterator[Finding]:
    config, base = drafter.config, target.config.get_text_config()
    theirs = getattr(base, "rope_parameters", None)
    if (
        isinstance(theirs, dict)
        and "rope_theta" in theirs
        and as_text(theirs) != as_text(config.rope_parameters)
    ):
        words = f"the target has {theirs}; drafters mostly turn as their target does."
        yield Finding("rope_parameters", config.rope_parameters, words)
    if config.max_position_embeddings < base.max_position_embeddings:
        words = (
            f"the target has {base.max_position_embeddings}: no engine is built for more than the smaller."
        )
        yield Finding("max_position_embeddings", config.max_position_embeddings, words)


def _numbers(target: Any, drafter: DFlashDraftModel) -> Iterator[Finding]:
    if drafter.dtype == torch.float16:
        yield Finding("dtype", drafter.dtype, "float16 overflows where drafters were trained in bfloat16.")
    stops = target.generation_config.eos_token_id
    stops = stops if isinstance(stops, list) else [stops]
    if drafter.config.mask_token_id in stops:
        words = "is a stop id of the target; a mask is mostly an id that no text holds."
        yield Finding("mask_token_id", drafter.config.mask_token_id, words)
