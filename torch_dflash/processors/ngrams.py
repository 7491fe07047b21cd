"""`NoRepeatNgram`: no n-gram occurs twice."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers.generation import logits_process

from torch_dflash.ops.spread import spread
from torch_dflash.processors.interface import Forgetful, Text, column
from torch_dflash.processors.options import Batch, Option, Twin, power_of_two, whole

MOST_BEHIND = 255
"""Rows that a round may compute behind a text's limit."""


@dataclass(frozen=True)
class NoRepeatNgram(Forgetful):
    """``no_repeat_ngram_size``: no token that would end an n-gram which prompt and text hold already.

    ``longest``: n of a row is at most this.
    """

    longest: int = 4
    options = (
        Option(
            "no_repeat_ngram_size",
            0,
            whole,
            "an integer of at least 0, in int32; 0 for none",
            per_row=True,
            twin=Twin(
                logits_process.NoRepeatNGramLogitsProcessor, lambda item, call: item.ngram_size, ban=True
            ),
        ),
    )

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        # Longer n-grams than the text, and a block behind its limit, do not occur twice.
        longest = [batch.width + new + MOST_BEHIND for new in batch.max_new_tokens]
        sizes = [
            size if size and size <= most else None
            for size, most in zip(cls.options[0].numbers(given, batch), longest, strict=True)
        ]
        return [(cls(power_of_two(max((size or 0 for size in sizes), default=0), 4)), sizes)]

    def covers(self, other: Any) -> bool:
        return isinstance(other, NoRepeatNgram) and other.longest <= self.longest

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> Tensor:
        return column(requested, 0, torch.int32)

    def __call__(self, memory: Tensor, text: Text, logits: Tensor) -> Tensor:
        tokens, size = text.tokens, memory[:, None, None]
        slot = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32)
        # Slot s ends an earlier n-gram whose first n - 1 tokens are the newest n - 1.
        same = (size > 0) & (slot >= size - 1) & (slot < text.length[..., None])
        for back in range(1, self.longest):
            newest = tokens.gather(1, (text.length - back).clamp(min=0).long())
            before = torch.roll(tokens, back, dims=1)  # what the slots before the n-gram's begin hold: unread
            same = same & ((before[:, None] == newest[..., None]) | (back >= size))
        vocab_size = logits.shape[-1]
        known = tokens < vocab_size  # a prompt may hold ids that have an embedding and no logit
        banned = torch.where(same & known[:, None], -torch.inf, 0.0).to(logits.dtype)
        ids = torch.where(known, tokens, 0)[:, None].expand(same.shape)
        return logits + spread(ids, banned, vocab_size)
