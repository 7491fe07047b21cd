"""transformers' own kind of processor, called on the host: in eager mode alone."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.processors.interface import Forgetful, Text


@dataclass(frozen=True, eq=False)
class HostProcessor(Forgetful):
    """A ``LogitsProcessor``, or any function of (ids [B, T], scores [B, V]), by transformers' contract.

    It is written for one new token at a time and may keep what it likes, so its rows are decoded one token a
    pass: the text is that of plain decoding, without a gain. Only one that is ``pure``, whose scores follow
    from ids and scores alone, is asked for each row of a block.

    Rows are padded on the left with ``pad_token_id``.
    """

    function: Callable[[Any, Any], Any]
    pure: bool = False
    pad_token_id: int = 0

    def values(self, asked: Sequence[Any], starts: Sequence[int]) -> tuple:
        return ()

    def __call__(self, memory: tuple, text: Text, logits: Tensor) -> Tensor:
        rows = [self._row(text, logits, at) for at in range(logits.shape[1])]
        return torch.stack(rows, dim=1)

    def _row(self, text: Text, logits: Tensor, at: int) -> Tensor:
        scores = self.function(self._ids(text.tokens, text.length[:, at]), logits[:, at].clone())
        if not isinstance(scores, Tensor) or scores.shape != logits[:, at].shape:
            found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"{self.name} returned {found}; return scores of {list(logits[:, at].shape)}.")
        return scores.to(logits.dtype)

    def _ids(self, tokens: Int[Tensor, "B S"], length: Int[Tensor, " B"]) -> Int[Tensor, "B T"]:
        """The text before a row as transformers hands it out."""
        longest = int(length.max())
        at = torch.arange(longest, device=tokens.device) - (longest - length[:, None])
        ids = tokens.gather(1, at.clamp(min=0).long())
        return torch.where(at >= 0, ids, self.pad_token_id).long()

    @property
    def name(self) -> str:
        """How messages call it."""
        return f"logits_processor {getattr(self.function, '__name__', type(self.function).__name__)}"
