"""`BlockProcessor` and `HostProcessor`: rules of users, in blocks or on the host."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.guards.reentry import entering
from torch_dflash.processors.interface import Forgetful, Text, check_callable, column


@dataclass(frozen=True, eq=False)
class HostProcessor(Forgetful):
    """A ``LogitsProcessor``, or any function of (ids [B, T], scores [B, V]), by transformers' contract.

    It is written for one new token at a time and may keep what it likes, so its rows are decoded one token a
    pass: the text is that of plain decoding, without a gain. Only one that is ``pure``, whose scores of a
    row follow from that row's ids and scores alone, is asked for each row of a block.

    Ids are those of transformers: the ``prompts`` [B, P] as they were given, masked columns too, then what is
    new; a row that has ended is filled up with ``pad_token_id``. Rows of a pure one gain at different rates:
    it gets them padded on the left instead.
    """

    function: Callable[[Any, Any], Any]
    pure: bool = False
    pad_token_id: int = 0
    prompts: Int[Tensor, "B P"] | None = None
    """Set by each call."""

    def __post_init__(self):
        check_callable(self)

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> Int[Tensor, " B"]:
        return column(starts, 0, torch.int32)

    def __call__(self, memory: Tensor, text: Text, logits: Tensor) -> Tensor:
        rows = [self._row(memory, text, logits, at) for at in range(logits.shape[1])]
        return torch.stack(rows, dim=1)

    def _row(self, starts: Tensor, text: Text, logits: Tensor, at: int) -> Tensor:
        ids = self._ids(text.tokens, text.length[:, at], starts)
        with entering(self.function):
            scores = self.function(ids, logits[:, at].clone())
        if not isinstance(scores, Tensor) or scores.shape != logits[:, at].shape:
            found = list(scores.shape) if isinstance(scores, Tensor) else type(scores).__name__
            raise ValueError(f"{self.name} returned {found}; return scores of {list(logits[:, at].shape)}.")
        return scores.to(logits.dtype)

    def _ids(self, tokens: Int[Tensor, "B S"], length: Tensor, starts: Tensor) -> Int[Tensor, "B T"]:
        """The text before a row as transformers hands it out."""
        if self.prompts is None:
            place = torch.arange(int(length.max()), device=tokens.device) - (length.max() - length[:, None])
            ids = tokens.gather(1, place.clamp(min=0).long())
            return torch.where(place >= 0, ids, self.pad_token_id).long()
        place = torch.arange(int((length - starts).max()), device=tokens.device) + starts[:, None]
        ids = tokens.gather(1, place.clamp(max=tokens.shape[1] - 1).long())
        fresh = torch.where(place < length[:, None], ids, self.pad_token_id)
        return torch.cat([self.prompts.to(fresh), fresh], dim=1).long()

    @property
    def name(self) -> str:
        """Its name in messages."""
        return f"logits_processor {getattr(self.function, '__name__', type(self.function).__name__)}"


@dataclass(frozen=True)
class BlockProcessor(Forgetful):
    """A function of text and logits that runs inside blocks, in both runtimes.

    ``function(tokens, length, logits)`` is given the text [B, S], int32, how much of it stands before each
    row of a pass, [B, M], int32, and the target's logits [B, M, V], float32; it returns logits of that shape.
    Row i of sequence b continues ``tokens[b, :length[b, i]]``, committed tokens and the drafts before the
    row; what stands behind is stale and must not be read.

    Rows of a tree of drafts come as [B * M] texts of one row each.

    It has to be pure and of torch operations alone that do not read values on the host, for XLA compiles it
    once: the text is then that of plain decoding with it, whatever is drafted. Two of the same function are
    equal, and compiled once.

    ```python
    never = td.BlockProcessor(lambda tokens, length, logits: logits.index_fill(2, ids, -torch.inf))
    ```
    """

    function: Callable[[Tensor, Tensor, Tensor], Tensor]

    def __post_init__(self):
        check_callable(self)

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> tuple:
        return ()

    def __call__(self, memory: tuple, text: Text, logits: Tensor) -> Tensor:
        changed = self.function(text.tokens, text.length, logits)
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            found = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"BlockProcessor: its function returned {found}; return logits of {list(logits.shape)}."
            )
        return changed
