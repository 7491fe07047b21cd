"""Biases on the last tokens of given sequences, and bans, which are biases without end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.checks import INT32_MAX
from torch_dflash.ops.spread import spread
from torch_dflash.processors.interface import Forgetful, Text


class Entry(NamedTuple):
    """``bias`` on the last of ``ids`` wherever the others stand before it.

    Only from a row's new token number ``first`` on, counted from 0, and before number ``last``; without
    them, in all the text.
    """

    ids: tuple[int, ...]
    bias: float
    first: int = 0
    last: int = INT32_MAX


class Table(NamedTuple):
    """Entries of each row, as tensors; a bias of 0 stands for none."""

    prefix: Int[Tensor, "B K L"]  # to the right; -1 before
    token: Int[Tensor, "B K"]
    bias: Float[Tensor, "B K"]
    first: Int[Tensor, "B K"]  # lengths of the text for which an entry counts
    last: Int[Tensor, "B K"]


@dataclass(frozen=True)
class SequenceBias(Forgetful):
    """``sequence_bias``, and before the penalties.

    Args:
        entries: most entries of a row.
        prefix: most ids of an entry before its last.
    """

    entries: int = 32
    prefix: int = 4

    def covers(self, other: Any) -> bool:
        return type(other) is type(self) and other.entries <= self.entries and other.prefix <= self.prefix

    def values(self, asked: Sequence[list[Entry] | None], starts: Sequence[int]) -> Table:
        rows, ints = len(asked), {"dtype": torch.int32, "device": "cpu"}
        prefix = torch.full((rows, self.entries, self.prefix), -1, **ints)
        token, first, last = (torch.zeros(rows, self.entries, **ints) for _ in range(3))
        bias = torch.zeros(rows, self.entries, device="cpu")
        for row, (entries, start) in enumerate(zip(asked, starts, strict=True)):
            for at, entry in enumerate(entries or ()):
                *before, token[row, at] = entry.ids
                prefix[row, at, self.prefix - len(before) :] = torch.tensor(before, **ints)
                bias[row, at] = entry.bias
                first[row, at] = max(len(before), start + entry.first if entry.first else 0)
                last[row, at] = min(start + entry.last, INT32_MAX)
        return Table(prefix, token, bias, first, last)

    def __call__(self, memory: Table, text: Text, logits: Tensor) -> Tensor:
        fits = self._follows(memory, text)
        length = text.length[..., None]
        fits = fits & (length >= memory.first[:, None]) & (length < memory.last[:, None])
        bias = torch.where(fits, memory.bias[:, None], 0.0).to(logits.dtype)
        return logits + spread(memory.token[:, None].expand(bias.shape), bias, logits.shape[-1])

    def _follows(self, memory: Table, text: Text) -> Bool[Tensor, "B M K"]:
        """Whether each row continues each entry's prefix."""
        back = torch.arange(self.prefix, 0, -1, device=text.length.device, dtype=torch.int32)
        at = (text.length[..., None] - back).clamp(min=0).long()  # [B, M, L]
        newest = text.tokens.gather(1, at.flatten(1)).view(at.shape)
        prefix = memory.prefix[:, None]
        return ((prefix == newest[:, :, None]) | (prefix < 0)).all(dim=-1)


@dataclass(frozen=True)
class Bans(SequenceBias):
    """What may not follow: ``bad_words_ids``, ``suppress_tokens``, ``min_new_tokens`` and their like."""
