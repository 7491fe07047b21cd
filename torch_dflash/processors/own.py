"""A user's own rule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_dflash.processors.interface import Forgetful, Text, check_callable


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

    def values(self, asked: Sequence[Any], starts: Sequence[int]) -> tuple:
        return ()

    def __call__(self, memory: tuple, text: Text, logits: Tensor) -> Tensor:
        changed = self.function(text.tokens, text.length, logits)
        if not isinstance(changed, Tensor) or changed.shape != logits.shape:
            found = list(changed.shape) if isinstance(changed, Tensor) else type(changed).__name__
            raise ValueError(
                f"BlockProcessor: its function returned {found}; return logits of {list(logits.shape)}."
            )
        return changed
