"""What makes a text end, or begin, as asked."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.spread import spread
from torch_dflash.processors.interface import Forgetful, Text, column


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

    def covers(self, other: Any) -> bool:
        return isinstance(other, ForcedTokens) and other.entries <= self.entries

    def values(self, asked: Sequence[list[tuple[int, int]] | None], starts: Sequence[int]) -> Forced:
        pairs = [
            [(token, start + number) for token, number in row or ()]
            for row, start in zip(asked, starts, strict=True)
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

    def covers(self, other: Any) -> bool:
        return isinstance(other, LengthDecay) and other.entries <= self.entries

    def values(self, asked: Sequence[Any], starts: Sequence[int]) -> Growth:
        rows = [row or (0, 1.0, ()) for row in asked]
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
