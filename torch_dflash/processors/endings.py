"""Forced ids at the begin and end of a text, and a growing weight of stop ids."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.generation import logits_process

from torch_dflash.checks import is_count, row_list
from torch_dflash.ops.spread import spread
from torch_dflash.processors.interface import Forgetful, Text, column
from torch_dflash.processors.options import Batch, Option, Twin, id_list, ids_of, power_of_two
from torch_dflash.processors.sequences import first_begun


class Forced(NamedTuple):
    """Ids of which one has to stand at a position, -1 for none."""

    token: Int[Tensor, "B K"]
    position: Int[Tensor, "B K"]


class Growth(NamedTuple):
    """From which length on the logits of which ids (-1 for none) grow, and by which factor a token."""

    start: Int[Tensor, " B"]
    factor: Float[Tensor, " B"]
    token: Int[Tensor, "B K"]


@dataclass(frozen=True)
class ForcedTokens(Forgetful):
    """``forced_bos_token_id`` and ``forced_eos_token_id``; at most ``entries`` of a row.

    A row asks for (id, number of the new token) pairs.
    """

    reads_text = False
    entries: int = 4
    options = (
        Option(
            "forced_bos_token_id",
            twin=Twin(
                logits_process.ForcedBOSTokenLogitsProcessor,
                lambda item, call: item.bos_token_id,
                forces=True,
            ),
        ),
        Option(
            "forced_eos_token_id",
            twin=Twin(
                logits_process.ForcedEOSTokenLogitsProcessor,
                lambda item, call: ids_of(item.eos_token_id),
                lambda item, call: item.max_length == call.max_length,
                forces=True,
            ),
        ),
    )

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        rows = [_forced(given, batch, row) for row in range(len(batch.max_new_tokens))]
        return [(cls(power_of_two(max(map(len, rows)), 4)), [pairs or None for pairs in rows])]

    def covers(self, other: Any) -> bool:
        return isinstance(other, ForcedTokens) and other.entries <= self.entries

    def values(self, requested: Sequence[list[tuple[int, int]] | None], starts: Sequence[int]) -> Forced:
        pairs = [
            [(token, start + number) for token, number in row or ()]
            for row, start in zip(requested, starts, strict=True)
        ]
        return Forced(
            *(_padded([[pair[of] for pair in row] for row in pairs], self.entries) for of in (0, 1))
        )

    def __call__(self, memory: Forced, text: Text, logits: Tensor) -> Tensor:
        here = text.length[..., None] == memory.position[:, None]  # [B, M, K]
        token = memory.token.clamp(min=0)[:, None].expand(here.shape)
        named = spread(token, here.to(torch.int32), logits.shape[-1])
        forced = torch.where(named > 0, 0.0, -torch.inf).to(logits.dtype)
        return torch.where(here.any(dim=-1, keepdim=True), forced, logits)


@dataclass(frozen=True)
class LengthDecay(Forgetful):
    """``exponential_decay_length_penalty``: the stop ids become likelier with each token.

    A row asks for (number of the new token from which on, factor, stop ids), of which ``entries`` at most.
    """

    reads_text = False
    entries: int = 8
    options = (
        Option(
            "exponential_decay_length_penalty",
            None,
            twin=Twin(
                logits_process.ExponentialDecayLengthPenalty,
                lambda item, call: (item.regulation_start - call.width, item.regulation_factor),
                lambda item, call: call.stops_of(item) and item.regulation_start >= call.width,
                sizes=True,
            ),
        ),
    )

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        decay = check_decay(given.get("exponential_decay_length_penalty"))
        stops = [[one for one in dict.fromkeys(row) if one < batch.vocab_size] for row in batch.stop_ids]
        rule = cls(power_of_two(max(map(len, stops)), 8))
        return [(rule, [(*decay, ids) if decay and ids else None for ids in stops])]

    def covers(self, other: Any) -> bool:
        return isinstance(other, LengthDecay) and other.entries <= self.entries

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> Growth:
        rows = [row or (0, 1.0, ()) for row in requested]
        start = [begin + row[0] for row, begin in zip(rows, starts, strict=True)]
        ids = _padded([row[2] for row in rows], self.entries)
        return Growth(column(start, 0, torch.int32), column([row[1] for row in rows], 1.0), ids)

    def __call__(self, memory: Growth, text: Text, logits: Tensor) -> Tensor:
        over = text.length - memory.start[:, None]
        grown = torch.where(over > 0, memory.factor[:, None] ** over - 1, 0.0)[..., None]
        token = memory.token.clamp(min=0)[:, None].expand(*over.shape, self.entries)
        own = logits.gather(2, token.long())
        used = (memory.token >= 0)[:, None] & torch.isfinite(own)
        gain = torch.where(used, own.abs() * grown, 0.0).to(logits.dtype)
        return logits + spread(token, gain, logits.shape[-1])


def _padded(rows: Sequence[Sequence[int]], width: int) -> Int[Tensor, "B K"]:
    filled = [[*row, *[-1] * (width - len(row))] for row in rows]
    return torch.tensor(filled, dtype=torch.int32, device="cpu").view(len(rows), width)


def _forced(options: dict[str, Any], batch: Batch, row: int) -> list[tuple[int, int]]:
    last = batch.max_new_tokens[row] - 1
    pairs = [(token, last) for token in _left("forced_eos_token_id", options, batch, last)]
    if batch.width == 1 and not (last == 0 and pairs):  # of two for one token transformers' last one counts
        pairs += [(token, 0) for token in _left("forced_bos_token_id", options, batch, 0)]
    return pairs


def _left(name: str, options: dict[str, Any], batch: Batch, number: int) -> list[int]:
    """Ids that are forced as new token ``number`` and not suppressed there."""
    vocab = batch.vocab_size
    left = id_list(name, options, vocab)
    names = "suppress_tokens", "begin_suppress_tokens"
    for suppressing in names[: 1 + (number == first_begun(options, batch))]:
        banned = id_list(suppressing, options, vocab)
        before, left = left, [token for token in left if token not in banned]
        if before and not left:
            raise ValueError(
                f"{name} and {suppressing} both hold {before[0]}: no token is left to force; leave it out of "
                "one of them."
            )
    return left


def check_decay(given: Any) -> tuple[int, float] | None:
    """``exponential_decay_length_penalty``: (first new token that it changes, factor of each)."""
    if given is None:
        return None
    pair = row_list(given)
    whole = isinstance(pair, list) and len(pair) == 2 and is_count(pair[0]) and isinstance(pair[1], Real)
    if not whole or not 0 <= pair[0] < 2**30 or isinstance(pair[1], bool) or not 0 < pair[1] < math.inf:
        raise ValueError(
            f"exponential_decay_length_penalty={given!r}: must be (number of tokens from 0 on, factor "
            "above 0), as (30, 1.01)."
        )
    return None if pair[1] == 1 else (int(pair[0]), float(pair[1]))
