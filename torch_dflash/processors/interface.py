"""What a processor is: a rule that a plan names, with values and a memory of each row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor


class Text(NamedTuple):
    """What stands before each row of a pass: plain decoding would show it the same.

    Row i of sequence b continues ``tokens[b, :length[b, i]]``, the committed text and the drafts before the
    row; what stands behind is stale. ``rows`` are the ids that no memory has taken in yet, of which row i
    follows the first i + 1; None where a memory holds all.
    """

    tokens: Int[Tensor, "B S"]
    length: Int[Tensor, "B M"]
    rows: Int[Tensor, "B M"] | None = None


@runtime_checkable
class Processor(Hashable, Protocol):
    """A pure rule, frozen and hashable: a plan names those that are compiled in.

    What differs from row to row are values, in tensors [B, ...]: another value compiles nothing. A memory has
    a bounded size for each row, and stands in the state as the caches do.
    """

    scaled: bool
    """Whether it changes logits that are divided by the temperature, after top-k, top-p and min-p."""

    def covers(self, other: Processor) -> bool:
        """Whether this rule, compiled in, can do all that ``other`` is asked for."""
        ...

    def values(self, asked: Sequence[Any], starts: Sequence[int]) -> Any:
        """What rows ask for (None: nothing), as tensors; ``starts`` are the lengths of their prompts."""
        ...

    def start(self, values: Any, vocab_size: int) -> Any:
        """The memory of rows that have no token yet, their values in it."""
        ...

    def read(self, memory: Any, ids: Int[Tensor, "B C"], count: Int[Tensor, " B"]) -> Any:
        """The memory after the first ``count[b]`` of ``ids[b]``, tokens of a prompt."""
        ...

    def observe(self, memory: Any, ids: Int[Tensor, "B M"], count: Int[Tensor, " B"]) -> Any:
        """The memory after the first ``count[b]`` of ``ids[b]``, tokens that the target picked."""
        ...

    def __call__(self, memory: Any, text: Text, logits: Float[Tensor, "B M V"]) -> Float[Tensor, "B M V"]:
        """The logits to pick from, in float32."""
        ...


class Forgetful:
    """A processor's own part where values are all that it keeps."""

    scaled = False

    def covers(self, other: Any) -> bool:
        return self == other

    def start(self, values: Any, vocab_size: int) -> Any:
        return values

    def read(self, memory: Any, ids: Tensor, count: Tensor) -> Any:
        return memory

    def observe(self, memory: Any, ids: Tensor, count: Tensor) -> Any:
        return memory


def check_callable(processor: Any) -> None:
    """Raise ``TypeError`` unless the processor's ``function`` can be called."""
    if not callable(processor.function):
        given = f"{type(processor).__name__}({processor.function!r})"
        raise TypeError(f"{given}: its function must be one that can be called.")


def column(asked: Sequence[Any], unset: float | int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number of each row, ``unset`` where a row asks for nothing."""
    return torch.tensor([unset if value is None else value for value in asked], dtype=dtype, device="cpu")


def process(
    processors: tuple[Processor, ...],
    memories: tuple,
    text: Text,
    logits: Float[Tensor, "B M V"],
    scaled: bool = False,
) -> Float[Tensor, "B M V"]:
    """``logits`` after each processor that is ``scaled``, or is not, in turn."""
    for processor, memory in zip(processors, memories, strict=True):
        if processor.scaled == scaled:
            logits = processor(memory, text, logits.to(torch.float32))
    return logits
