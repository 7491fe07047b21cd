"""`DecodeState`, and the values that the steps of a round exchange."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, NamedTuple

from jaxtyping import Bool, Float, Int, UInt8
from torch import Tensor

from torch_dflash.ops.windows import read_rows
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class Sampling:
    """Sampling options of each row, as data: a new request never recompiles.

    ``temperature`` 0 is greedy; ``top_k`` 0, ``top_p`` 1 and ``min_p`` 0 filter nothing and are read only
    when the plan has ``filters``. ``seed`` is the row's 32-bit key.
    """

    temperature: Float[Tensor, " B"]
    top_k: Int[Tensor, " B"]
    top_p: Float[Tensor, " B"]
    min_p: Float[Tensor, " B"]
    seed: Int[Tensor, " B"]


@register_state
@dataclass(frozen=True)
class DecodeState:
    """A batch in mid-generation. Steps consume it: cache buffers are written in place or donated.

    The anchor is derived, not stored: ``tokens[b, length[b]]`` is committed, but the target has not read it
    yet, so a row holds ``length + 1`` committed tokens. Later entries are stale drafts.

    With the prompt 5 6 7 and the first new token 9, ``tokens`` is [[5, 6, 7, 9, 0, 0]], ``length`` 3 and the
    anchor 9.
    """

    tokens: Int[Tensor, "B S"]  # left-aligned: column = absolute position
    length: Int[Tensor, " B"]  # tokens whose target K/V are committed; positions derive from it
    limit: Int[Tensor, " B"]  # most tokens the row may hold, prompt included
    stop_ids: Int[Tensor, "B E"]  # padded with -1, which no token equals
    done: Bool[Tensor, " B"]
    sampling: Sampling
    cache: tuple  # one state per target layer
    page_table: Int[Tensor, "B row_pages"] | None  # paged caches: page numbers, 0 where a row has no page
    proposer: Any  # the state of the proposer
    rules: tuple  # one memory per processor of the plan
    accepted: UInt8[Tensor, "B S"]  # tokens committed in each round, trimmed at stop ids, not at limit
    rounds: Int[Tensor, " B"]
    record: dict[str, Tensor] = field(default_factory=dict)  # outputs of the plan (`record`)

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Committed tokens of each row, the anchor included."""
        return self.length + 1

    @property
    def anchor(self) -> Int[Tensor, " B"]:
        """Each row's newest committed token."""
        return read_rows(self.tokens, self.length, 1)[:, 0]


@register_state
@dataclass(frozen=True)
class PromptChunk:
    """A piece of each row's prompt: ``ids`` [B, C], the first ``count`` [B] of them real (0: no piece).

    ``following`` [B] is the prompt token after the piece, or -1 where the prompt ends with the piece and the
    target picks the next token. A further turn begins with the row's anchor, which is committed but has no
    K/V yet; the host first raises ``limit`` and clears ``done``.
    """

    ids: Int[Tensor, "B C"]
    count: Int[Tensor, " B"]
    following: Int[Tensor, " B"]


@register_state
@dataclass(frozen=True)
class Draft:
    """Proposed tokens [B, N] after the anchor, ``valid`` [B] of them real, up to one out of the vocabulary.

    ``parent`` [B, N] makes them a tree: nodes in depth-first preorder, each with its parent's number, -1 for
    the anchor; None means a chain. The first nodes of a tree are a tree. A tree ends before the first node
    that breaks the preorder or is deeper than `Proposer.depth`.
    """

    tokens: Int[Tensor, "B N"]
    valid: Int[Tensor, " B"]
    parent: Int[Tensor, "B N"] | None = None


class DraftRequest(NamedTuple):
    """A round's options for the draft.

    Attributes:
        sampling: of each row.
        rows: of the verify pass, the anchor included; further nodes of a tree are dropped.
    """

    sampling: Sampling
    rows: int
