"""What changes the target's logits before it picks: penalties, bans, grammars.

A plan names its processors, so one is compiled in by what it is; what differs from row to row belongs
into `torch_dflash.state.Sampling`. No option asks for one yet: `torch_dflash.engine.refusals` refuses
those of transformers by name.
"""

from __future__ import annotations

from collections.abc import Hashable
from typing import Protocol, runtime_checkable

from jaxtyping import Float, Int
from torch import Tensor


@runtime_checkable
class Processor(Hashable, Protocol):
    """A pure function of text and logits, frozen and hashable: a plan names those that are compiled in.

    It sees what plain decoding would show it: row i of sequence b continues ``tokens[b, :length[b, i]]``,
    which is the committed text and the drafts before this row. What stands behind is stale.
    """

    def __call__(
        self, tokens: Int[Tensor, "B S"], length: Int[Tensor, "B M"], logits: Float[Tensor, "B M V"]
    ) -> Float[Tensor, "B M V"]:
        """The logits to pick from."""
        ...


def process(
    processors: tuple[Processor, ...],
    tokens: Int[Tensor, "B S"],
    length: Int[Tensor, "B M"],
    logits: Float[Tensor, "B M V"],
) -> Float[Tensor, "B M V"]:
    """``logits`` after each processor in turn."""
    for processor in processors:
        logits = processor(tokens, length, logits)
    return logits
