"""Penalties on tokens that a text holds already."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process

from torch_dflash.ops.spread import spread
from torch_dflash.processors.interface import Forgetful, Text, column
from torch_dflash.processors.options import FLOAT32_MAX, Batch, Option, TransformersCall, Twin


class Seen(NamedTuple):
    """Ids of a row as V+1 flags; the last column takes ids that are not kept."""

    penalty: Float[Tensor, " B"]
    ids: Bool[Tensor, "B columns"]


class Counts(NamedTuple):
    """Counts of the ids that the target picked, V+1 columns; the last one takes ids that are not kept."""

    presence: Float[Tensor, " B"]
    frequency: Float[Tensor, " B"]
    ids: Int[Tensor, "B columns"]


def _ignores_padding(item: Any, call: TransformersCall) -> bool:
    """As transformers' own does. A number ignores a part of the prompt, and None counts the padding too."""
    ignored = getattr(item, "prompt_ignore_length", None)
    if isinstance(ignored, Tensor):
        return tuple(ignored.tolist()) == call.padding
    return ignored is None and not any(call.padding)


_FINITE = "a finite number in float32; 0.0 for none"


@dataclass(frozen=True)
class RepetitionPenalty(Forgetful):
    """``repetition_penalty`` (arXiv 1909.05858): on every id of the prompt and of the text, once."""

    reads_text = False
    options = (
        Option(
            "repetition_penalty",
            1.0,
            lambda v: 1 / FLOAT32_MAX <= v <= FLOAT32_MAX,
            "a number above 0 in float32; 1.0 for none",
            per_row=True,
            twin=Twin(
                logits_process.RepetitionPenaltyLogitsProcessor,
                lambda item, call: item.penalty,
                _ignores_padding,
                "that leaves out a part of the prompts, or counts their padding, as transformers before 5.23 "
                "does; pass {} to td.generate, or one prompt at a time.",
                sizes=True,
            ),
        ),
    )

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> Tensor:
        return column(requested, 1.0)

    def start(self, values: Tensor, vocab_size: int) -> Seen:
        shape = (len(values), vocab_size + 1)
        return Seen(values, torch.zeros(shape, dtype=torch.bool, device=values.device))

    def read(self, memory: Seen, ids: Tensor, count: Tensor) -> Seen:
        return memory._replace(ids=memory.ids | (tally(memory.ids, ids, count) > 0))

    observe = read

    def __call__(self, memory: Seen, text: Text, logits: Tensor) -> Tensor:
        penalty = memory.penalty[:, None, None]
        changed = torch.where(logits < 0, logits * penalty, logits / penalty)
        seen = memory.ids[:, None, : logits.shape[-1]] | (inside(text, logits) > 0)
        return torch.where(seen, changed, logits)


@dataclass(frozen=True)
class OccurrencePenalty(Forgetful):
    """``presence_penalty`` and ``frequency_penalty``, as servers know them: on ids that the target picked.

    The one is taken off once, the other for each time.
    """

    reads_text = False
    options = tuple(
        Option(name, 0.0, lambda v: abs(v) <= FLOAT32_MAX, _FINITE, per_row=True, ours=True)
        for name in ("presence_penalty", "frequency_penalty")
    )

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        pairs = zip(*(option.numbers(given, batch) for option in cls.options), strict=True)
        return [(cls(), [(a or 0.0, b or 0.0) if a or b else None for a, b in pairs])]

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> tuple[Tensor, Tensor]:
        pairs = [value or (0.0, 0.0) for value in requested]
        return column([pair[0] for pair in pairs], 0.0), column([pair[1] for pair in pairs], 0.0)

    def start(self, values: tuple[Tensor, Tensor], vocab_size: int) -> Counts:
        shape, device = (len(values[0]), vocab_size + 1), values[0].device
        return Counts(*values, torch.zeros(shape, dtype=torch.int32, device=device))

    def observe(self, memory: Counts, ids: Tensor, count: Tensor) -> Counts:
        return memory._replace(ids=memory.ids + tally(memory.ids, ids, count))

    def __call__(self, memory: Counts, text: Text, logits: Tensor) -> Tensor:
        times = memory.ids[:, None, : logits.shape[-1]] + inside(text, logits)
        presence, frequency = memory.presence[:, None, None], memory.frequency[:, None, None]
        return logits - frequency * times - presence * (times > 0)


def tally(like: Tensor, ids: Int[Tensor, "B C"], count: Int[Tensor, " B"]) -> Int[Tensor, "B columns"]:
    """Counts of each id among the first ``count[b]`` of ``ids[b]``; the rest go to the last column."""
    at = torch.arange(ids.shape[1], device=ids.device)
    kept = torch.where(at < count[:, None], ids, like.shape[1] - 1).to(torch.int32)
    return spread(kept[:, None], torch.ones_like(kept)[:, None], like.shape[1])[:, 0]


def inside(text: Text, logits: Tensor) -> Any:
    """Counts of each id in the rows up to each row, [B, M, V]."""
    if text.rows is None:
        return torch.zeros_like(logits[:, :1])
    ids = torch.arange(logits.shape[-1], device=logits.device, dtype=text.rows.dtype)
    named = text.rows[..., None] == ids
    if text.tree is not None:
        return (text.tree.seen().to(torch.float32) @ named.to(torch.float32)).to(torch.int32)
    return named.to(torch.int32).cumsum(dim=1, dtype=torch.int32)
