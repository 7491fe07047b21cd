"""The `Processor` protocol: a logits rule with values and memory per row."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from functools import partial
from typing import Any, ClassVar, NamedTuple, Protocol, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dflash.ops.trees import Tree
from torch_dflash.ops.windows import write_rows
from torch_dflash.processors.options import Batch, Option


class Text(NamedTuple):
    """The text before each row of a pass, the same as in plain decoding.

    Row i of sequence b continues ``tokens[b, :length[b, i]]``, the committed text and the drafts before the
    row; what stands behind is stale. ``rows`` are the ids that no memory has taken in yet, of which row i
    follows the first i + 1; None where a memory holds all.

    Rows of a ``tree`` follow those on their own paths, of at most ``deepest`` nodes. ``tokens`` then end
    before the anchor: only a rule that does not read them is given such a text.
    """

    tokens: Int[Tensor, "B S"]
    length: Int[Tensor, "B M"]
    rows: Int[Tensor, "B M"] | None = None
    tree: Tree | None = None
    deepest: int = 0


@runtime_checkable
class Processor(Hashable, Protocol):
    """A pure rule, frozen and hashable: a plan names those that are compiled in.

    What differs from row to row are values, in tensors [B, ...]: another value compiles nothing. A memory has
    a bounded size for each row, and stands in the state as the caches do.
    """

    scaled: bool
    """Whether it changes logits that are divided by the temperature, after top-k, top-p and min-p."""
    reads_text: bool
    """Whether it reads a text's tokens: the rows of a tree come to it as rows of the batch."""

    def covers(self, other: Processor) -> bool:
        """Whether this rule, compiled in, can do all that ``other`` is asked for."""
        ...

    def values(self, requested: Sequence[Any], starts: Sequence[int]) -> Any:
        """The rows' values (None: nothing) as tensors; ``starts`` are the lengths of their prompts."""
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

    scaled, reads_text = False, True
    options: ClassVar[tuple[Option, ...]] = ()
    """Options of a call that this rule stands for; a user's own rule has none."""

    @classmethod
    def read_options(cls, given: dict[str, Any], batch: Batch) -> list[tuple[Any, list[Any]]]:
        """Processors for the options ``given``, and what each row asks of them; here one number a row.

        Raises:
            ValueError: an option is of the wrong type or out of range.
        """
        return [(cls(), option.numbers(given, batch)) for option in cls.options]

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


def column(requested: Sequence[Any], unset: float | int, dtype: torch.dtype = torch.float32) -> Tensor:
    """One number of each row, ``unset`` where a row asks for nothing."""
    return torch.tensor([unset if value is None else value for value in requested], dtype=dtype, device="cpu")


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
            unfolded = text.tree is not None and processor.reads_text
            rule = partial(on_paths, processor) if unfolded else processor
            logits = rule(memory, text, logits.to(torch.float32))
    return logits


def on_paths(processor: Processor, memory: Any, text: Text, logits: Float[Tensor, "B M V"]) -> Tensor:
    """``logits`` after ``processor``, to which each row of a tree is a text that ends with the row's path."""
    tree, rows, count = text.tree, text.rows, logits.shape[1]
    assert tree is not None and rows is not None

    def each(leaf: Tensor) -> Tensor:
        return leaf[:, None].expand(-1, count, *leaf.shape[1:]).flatten(0, 1)

    step = torch.arange(min(text.deepest, count - 1) + 1, device=rows.device, dtype=torch.int32)
    here = tree.seen()[:, :, None] & (tree.depth[:, None] == step[:, None])[:, None]  # [B, M, path, M]
    paths = torch.where(here, rows[:, None, None], 0).sum(dim=-1, dtype=torch.int32).flatten(0, 1)
    # A copy: of one sequence all rows are views of the same tokens, and eagerly they are written in place.
    tokens = write_rows(each(text.tokens).clone(), paths, each(text.length[:, 0] - 1), dim=1)
    alone = Text(tokens, text.length.flatten()[:, None])
    return processor(pytree.tree_map(each, memory), alone, logits.flatten(0, 1)[:, None]).view(logits.shape)
