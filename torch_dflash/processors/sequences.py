"""Biases on the last tokens of given sequences, and bans, which are biases without end."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor
from transformers.generation import logits_process

from torch_dflash.checks import INT32_MAX, check_counts, one_per_row
from torch_dflash.ops.spread import spread
from torch_dflash.processors.interface import Forgetful, Text
from torch_dflash.processors.options import (
    Batch,
    Option,
    Twin,
    check_sequences,
    id_list,
    ids_of,
    power_of_two,
    whole,
)


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
    options = (
        Option(
            "sequence_bias",
            twin=Twin(
                logits_process.SequenceBiasLogitsProcessor, lambda item, call: dict(item.sequence_bias)
            ),
        ),
    )

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        biases = check_sequences("sequence_bias", given.get("sequence_bias"), batch.vocab_size)
        entries = [Entry(ids, bias) for ids, bias in biases]
        return [(cls._of_size([entries]), [entries or None] * len(batch.max_new_tokens))]

    @classmethod
    def _of_size(cls, rows: list[list[Entry]]) -> SequenceBias:
        entries = max(map(len, rows), default=0)
        prefix = max((len(entry.ids) - 1 for row in rows for entry in row), default=0)
        return cls(power_of_two(entries, 32), power_of_two(prefix, 4))

    def covers(self, other: Any) -> bool:
        return type(other) is type(self) and other.entries <= self.entries and other.prefix <= self.prefix

    def values(self, requested: Sequence[list[Entry] | None], starts: Sequence[int]) -> Table:
        rows, ints = len(requested), {"dtype": torch.int32, "device": "cpu"}
        prefix = torch.full((rows, self.entries, self.prefix), -1, **ints)
        token, first, last = (torch.zeros(rows, self.entries, **ints) for _ in range(3))
        bias = torch.zeros(rows, self.entries, device="cpu")
        for row, (entries, start) in enumerate(zip(requested, starts, strict=True)):
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
    """Tokens that may not follow: ``bad_words_ids``, ``suppress_tokens``, ``min_new_tokens`` and others."""

    options = (
        Option(
            "bad_words_ids",
            twin=Twin(
                logits_process.NoBadWordsLogitsProcessor,
                lambda item, call: [list(ids) for ids in item.sequence_bias],
                ban=True,
            ),
        ),
        Option(
            "min_length",
            0,
            whole,
            "an integer of at least 0",
            twin=Twin(
                logits_process.MinLengthLogitsProcessor,
                lambda item, call: item.min_length,
                lambda item, call: call.stops_of(item),
                ban=True,
            ),
        ),
        Option(
            "min_new_tokens",
            0,
            whole,
            "an integer of at least 0, in int32; 0 for none",
            per_row=True,
            twin=Twin(
                logits_process.MinNewTokensLengthLogitsProcessor,
                lambda item, call: max(item.prompt_length_to_skip + item.min_new_tokens - call.width, 0),
                lambda item, call: call.stops_of(item),
                ban=True,
            ),
        ),
        Option(
            "suppress_tokens",
            twin=Twin(
                logits_process.SuppressTokensLogitsProcessor,
                lambda item, call: ids_of(item.suppress_tokens),
                ban=True,
            ),
        ),
        Option(
            "begin_suppress_tokens",
            twin=Twin(
                logits_process.SuppressTokensAtBeginLogitsProcessor,
                lambda item, call: ids_of(item.begin_suppress_tokens),
                lambda item, call: item.begin_index == call.begins,
                ban=True,
            ),
        ),
    )

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        least = next(one for one in cls.options if one.name == "min_new_tokens").numbers(given, batch)
        check_counts(least=0, min_length=given.get("min_length"))
        bans = [_bans(given, least[row], batch, row) for row in range(len(batch.max_new_tokens))]
        return [(cls._of_size(bans), [entries or None for entries in bans])]


def _bans(options: dict[str, Any], least: int | None, batch: Batch, row: int) -> list[Entry]:
    vocab, stops = batch.vocab_size, batch.stop_ids[row]
    words = check_sequences("bad_words_ids", options.get("bad_words_ids"), vocab)
    banned = [Entry(ids, bias) for ids, bias in words if ids not in [(stop,) for stop in stops]]
    banned += [Entry((token,), -math.inf) for token in id_list("suppress_tokens", options, vocab)]
    first = first_begun(options, batch)
    for token in id_list("begin_suppress_tokens", options, vocab):
        banned.append(Entry((token,), -math.inf, first, first + 1))
    # transformers: the number of new tokens, if it is given, counts instead of that of all, though it be 0.
    given = one_per_row("min_new_tokens", options.get("min_new_tokens"), len(batch.max_new_tokens))[row]
    fewest = least or 0 if given is not None else (options.get("min_length") or 0) - batch.width
    if fewest > 0:
        banned += [Entry((stop,), -math.inf, 0, fewest) for stop in stops if stop < vocab]
    return banned


def first_begun(options: dict[str, Any], batch: Batch) -> int:
    """The new token of ``begin_suppress_tokens``: transformers leaves the first to a forced one."""
    return int(batch.width == 1 and bool(id_list("forced_bos_token_id", options, batch.vocab_size)))
