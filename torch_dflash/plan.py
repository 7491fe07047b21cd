"""`DecodePlan`: the static options of a compiled round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch_dflash.checks import INT32_MAX, Cache, Precision, check_cache, check_precision

if TYPE_CHECKING:
    from torch_dflash.processors.interface import Processor
else:
    Processor = Any  # the command line reads the plan's fields without torch

TILE = 16
"""Rows of a bfloat16 tile on every TPU. Buffers of whole tiles keep their layout."""
MIN_BUCKET = TILE
MOST_TREE_ROWS = 64
OUTPUTS = ("output_scores", "output_logits", "output_logprobs")
"""Options for logits, scores and log-probabilities of the picked tokens."""


def whole_tiles(rows: int) -> int:
    """The multiple of `TILE` that holds ``rows``."""
    return -(-rows // TILE) * TILE


@dataclass(frozen=True)
class DecodePlan:
    """Shapes and kinds of a compiled round, all that it depends on. Frozen and hashable.

    Args:
        batch_size: rows B.
        capacity: positions a row may fill (prompt and new tokens), before slack.
        block_size: rows W of a draft, the anchor included; 1 decodes without drafting.
        verify_width: rows M of the verify pass, the anchor included; at most ``block_size``.
        depth: nodes on the deepest path of a draft that may be a tree; None: drafts are chains.
        stop_slots: most stop ids E of a row.
        rounds_per_chunk: rounds between two host reads.
        filters: whether top-k, top-p and min-p are compiled in (they sort the vocabulary).
        processors: kinds of logits rules, in their order.
        outputs: kept values of the picks: some of `OUTPUTS`, in its order.
        top_logprobs: the number of likeliest ids whose log-probabilities are kept.
        matmul_precision: XLA matmul precision; "highest" for fp32 exactness off the CPU.
        cache: kind of the target's cache: "static" (dense, a whole row's positions each) or "paged".
        page_size: positions in a page.
        pool_pages: pages of all rows together; unset: the positions of a dense cache.
    """

    batch_size: int
    capacity: int
    block_size: int
    verify_width: int
    stop_slots: int = 8
    rounds_per_chunk: int = 16
    filters: bool = False
    processors: tuple[Processor, ...] = ()
    outputs: tuple[str, ...] = ()
    top_logprobs: int = 0
    matmul_precision: Precision = "highest"
    cache: Cache = "static"
    page_size: int = 64
    pool_pages: int | None = None
    depth: int | None = None

    def __post_init__(self):
        for name in ("batch_size", "capacity", "block_size", "verify_width", "rounds_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.verify_width > self.block_size:
            raise ValueError(
                f"verify_width={self.verify_width} is wider than block_size={self.block_size}; at most the "
                "whole block, or all rows= of a tree, can be verified."
            )
        if self.block_size > 255:
            raise ValueError(f"block_size={self.block_size}: acceptance is counted in 8 bits; use <= 255.")
        if self.depth is not None and (self.verify_width > MOST_TREE_ROWS or self.depth < 1):
            raise ValueError(
                f"verify_width={self.verify_width}, depth={self.depth}: a tree of drafts has at most "
                f"{MOST_TREE_ROWS} rows, the anchor included, and at least one node on a path."
            )
        check_precision(self.matmul_precision)
        check_cache(self.cache)
        if self.cache == "static" and self.pool_pages is not None:
            raise ValueError(f"pool_pages={self.pool_pages}: only cache='paged' has pages; leave it out.")
        if self.page_size < MIN_BUCKET or self.page_size % MIN_BUCKET:
            raise ValueError(f"page_size={self.page_size}: must be a multiple of {MIN_BUCKET}.")
        positions = self.batch_size * self.slots
        if positions > INT32_MAX or self.stop_slots * self.batch_size > INT32_MAX:
            raise ValueError(
                f"batch_size={self.batch_size}, max_length={self.capacity}, stop_slots={self.stop_slots}: a "
                "buffer's entries are counted in int32; lower them."
            )
        if self.pages * self.page_size > INT32_MAX:
            raise ValueError(
                f"pool_pages={self.pool_pages}, page_size={self.page_size}: positions are int32; lower them."
            )
        if self.pool_pages is not None and self.pool_pages < self.row_pages:
            raise ValueError(
                f"pool_pages={self.pool_pages}: one row of max_length={self.capacity} alone may need "
                f"{self.row_pages} pages of {self.page_size}; pass at least so many, or lower max_length."
            )

    @property
    def nodes(self) -> int:
        """Drafted tokens N per round."""
        return self.block_size - 1

    @property
    def gain(self) -> int:
        """Most tokens of a round: the drafts of a path and the bonus."""
        return self.verify_width if self.depth is None else min(self.verify_width, self.depth + 1)

    @property
    def most_gained(self) -> int:
        """Most tokens that a row gains between two host reads: those of all rounds and of a prompt's pass."""
        return self.rounds_per_chunk * self.gain + 1

    @property
    def slack(self) -> int:
        """Slots past ``capacity``, at the end of every buffer, that a clamped window may write to."""
        return max(MIN_BUCKET, self.block_size if self.depth is None else self.gain)

    @property
    def slots(self) -> int:
        """Positions S of every per-position buffer."""
        return whole_tiles(self.capacity + self.slack)

    @property
    def row_pages(self) -> int:
        """Most pages of a row: the width of its page table."""
        return -(-self.slots // self.page_size)

    @property
    def pages(self) -> int:
        """Pages P of a paged cache's pool, with the unowned page 0."""
        return 1 + (self.pool_pages or self.batch_size * self.row_pages)
