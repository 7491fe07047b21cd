"""What varies while decoding (`DecodeState`), what is compiled (`DecodePlan`), and what a round passes on."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, TypeVar

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dflash.checks import INT32_MAX, check_cache, check_precision

TILE = 16
"""Rows of a tile of bfloat16 on every TPU. Buffers of whole tiles are laid out as they are written here."""
MIN_BUCKET = TILE
Registered = TypeVar("Registered", bound=type)


def whole_tiles(rows: int) -> int:
    """The multiple of `TILE` that holds ``rows``."""
    return -(-rows // TILE) * TILE


@dataclass(frozen=True)
class DecodePlan:
    """Shapes and kinds: everything a compiled round depends on. Frozen and hashable.

    Args:
        batch_size: rows B.
        capacity: positions a row may fill (prompt and new tokens), before slack.
        block_size: rows W of the draft pass, the anchor included; 1 decodes without drafting.
        verify_width: rows M of the verify pass, the anchor included; at most ``block_size``.
        stop_slots: stop ids E a row may carry.
        rounds_per_chunk: rounds between two host reads.
        filters: whether top-k, top-p and min-p are compiled in (they sort the vocabulary).
        matmul_precision: XLA matmul precision; "highest" for fp32 exactness off the CPU.
        cache: kind of the target's cache: "static" (dense, a whole row's positions each) or "paged".
        page_size: positions in a page.
        pool_pages: pages that all rows share; unset: as many as a dense cache would take.
    """

    batch_size: int
    capacity: int
    block_size: int
    verify_width: int
    stop_slots: int = 8
    rounds_per_chunk: int = 16
    filters: bool = False
    matmul_precision: str = "highest"
    cache: str = "static"
    page_size: int = 64
    pool_pages: int | None = None

    def __post_init__(self):
        for name in ("batch_size", "capacity", "block_size", "verify_width", "rounds_per_chunk"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)}: must be at least 1.")
        if self.verify_width > self.block_size:
            raise ValueError(
                f"verify_width={self.verify_width} is wider than block_size={self.block_size}; "
                "at most the whole block can be verified."
            )
        if self.block_size > 255:
            raise ValueError(f"block_size={self.block_size}: acceptance is counted in 8 bits; use <= 255.")
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
                f"pool_pages={self.pool_pages}, page_size={self.page_size}: positions are counted in int32; "
                "lower them."
            )
        if self.pool_pages is not None and self.pool_pages < self.row_pages:
            raise ValueError(
                f"pool_pages={self.pool_pages}: one row of capacity {self.capacity} alone may need "
                f"{self.row_pages} pages of {self.page_size}; give at least so many, or lower the capacity."
            )

    @property
    def nodes(self) -> int:
        """Drafted tokens N per round."""
        return self.block_size - 1

    @property
    def slack(self) -> int:
        """Slots past ``capacity`` that a clamped window may spill into; every buffer ends in them."""
        return max(MIN_BUCKET, self.block_size, self.verify_width, self.nodes)

    @property
    def slots(self) -> int:
        """Positions S of every per-position buffer."""
        return whole_tiles(self.capacity + self.slack)

    @property
    def row_pages(self) -> int:
        """Most pages T a row may have: the width of its page table."""
        return -(-self.slots // self.page_size)

    @property
    def pages(self) -> int:
        """Pages P of a paged cache's pools, the write-off page 0 included."""
        return 1 + (self.pool_pages or self.batch_size * self.row_pages)


@dataclass(frozen=True)
class Sampling:
    """How each row picks tokens: data, so that a new request never recompiles.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter nothing and are read only
    when the plan has ``filters``. ``seed`` is the row's own 32-bit key.
    """

    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    min_p: Float[Tensor, " B"]
    seed: Int[Tensor, " B"]


@dataclass(frozen=True)
class DecodeState:
    """A batch in mid-generation. Steps consume it: cache buffers are written in place or donated.

    The anchor is derived, not stored: ``tokens[b, length[b]]`` is committed but not yet seen by the
    target, so a row holds ``length + 1`` committed tokens. Entries past it are stale drafts.

    >>> # tokens [[5, 6, 7, 9, 0, 0]], prompt 5 6 7, first new token 9:  length 3, anchor 9
    """

    tokens: Int[Tensor, "B S"]  # left-aligned: column = absolute position
    length: Int[Tensor, " B"]  # tokens whose target K/V are committed; positions derive from it
    prompt_length: Int[Tensor, " B"]
    limit: Int[Tensor, " B"]  # most tokens the row may hold, prompt included
    stop_ids: Int[Tensor, "B E"]  # padded with -1, which no token equals
    done: Bool[Tensor, " B"]
    sampling: Sampling
    cache: tuple  # one state per target layer
    pages: Int[Tensor, "B T"] | None  # paged caches: page numbers, 0 where a row has no page
    proposer: Any  # whatever the proposer keeps
    accepted: UInt8[Tensor, "B S"]  # tokens committed in each round, trimmed at stop ids, not at limit
    rounds: Int[Tensor, " B"]


@dataclass(frozen=True)
class PromptChunk:
    """A piece of each row's prompt: ``ids`` [B, C], of which ``count`` [B] are real (0 = nothing).

    ``following`` [B] is the prompt token after the piece, or -1 where the prompt ends in it and the
    target picks the next token. A further turn begins with the row's anchor, which is committed but has no
    K/V yet; the host raises ``limit`` and clears ``done`` for it first.
    """

    ids: Int[Tensor, "B C"]
    count: Int[Tensor, " B"]
    following: Int[Tensor, " B"]


@dataclass(frozen=True)
class Draft:
    """Proposed tokens [B, N] after the anchor, ``valid`` [B] of them real, up to one out of the vocabulary.

    ``parent`` None means a chain; a round refuses anything else.
    """

    tokens: Int[Tensor, "B N"]
    valid: Int[Tensor, " B"]
    parent: Int[Tensor, "B N"] | None = None


@dataclass(frozen=True)
class Commit:
    """What a round keeps: ``path`` [B, M] verify rows in order, ``count`` [B] of them, then ``bonus`` [B].

    ``count`` includes the anchor's row, so it is also the number of new tokens (accepted drafts + bonus).
    """

    path: Int[Tensor, "B M"]
    count: Int[Tensor, " B"]
    bonus: Int[Tensor, " B"]


PYTREES: list[tuple[type, list[str]]] = []
"""Every dataclass that may stand in a state, with its fields; `jax_bridge` registers them with JAX."""


def register_state(cls: Registered) -> Registered:
    """Make a frozen dataclass a pytree node (class decorator for proposer and cache states)."""
    fields = [field.name for field in dataclasses.fields(cls)]
    pytree.register_dataclass(cls)
    PYTREES.append((cls, fields))
    return cls


for _cls in (Sampling, DecodeState, PromptChunk, Draft, Commit):
    register_state(_cls)
