"""`LookaheadProposer`: lookahead decoding, whose n-grams are the target's own, without a drafter.

Source: Fu et al. 2024, arXiv 2402.02057. Its lookahead branch is a Jacobi iteration over the next positions,
its verification branch drafts n-grams of earlier iterations. Both stand in one tree here, so a guess of the
newest iteration may be committed, too.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NoReturn

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.checks import is_count
from torch_dflash.ops.windows import write_rows
from torch_dflash.plan import MOST_TREE_ROWS, DecodePlan
from torch_dflash.proposers.base import Proposer
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft

POOL = 512
"""N-grams that a row keeps, at least."""
NONE = -1
"""In place of an id: an n-gram that is not there, or a pick that was not made."""


@register_state
@dataclass(frozen=True)
class LookaheadState:
    """A row's Jacobi window and its pool of n-grams.

    ``window[b, j, w]`` is a guess of the token ``j + w + 1`` positions after the anchor, made in the round
    before the one of level ``j - 1``. ``fresh`` holds the picks after the last level until `observe` joins
    them to the window, else `NONE`. ``pool`` is a ring; ``place`` is that of its next n-grams.
    """

    window: Int[Tensor, "B levels columns"]
    fresh: Int[Tensor, "B columns"]
    pool: Int[Tensor, "B pooled ngram"]
    place: Int[Tensor, " B"]
    length: Int[Tensor, " B"]

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Tokens taken in; equals the target's committed length between rounds."""
        return self.length


class LookaheadProposer(Proposer):
    """Lookahead decoding (Fu et al. 2024): the target verifies n-grams that it made itself, and makes more.

    A round's tree has ``1 + (guesses + window) * (ngram - 1)`` rows: chains of the newest n-grams that begin
    with the anchor, then a trunk of guesses with their later levels behind each.

    Args:
        ngram: tokens of an n-gram, the one it begins with included.
        window: positions whose tokens are guessed.
        guesses: most n-grams of the pool in a round.

    Raises:
        ValueError: an argument out of range, or a tree of more than 64 rows.
    """

    name = "lookahead"

    def __init__(self, ngram: int = 3, window: int = 8, guesses: int = 6):
        super().__init__()
        for name, value, least in (("ngram", ngram, 2), ("window", window, 1), ("guesses", guesses, 1)):
            if not is_count(value) or not least <= value < MOST_TREE_ROWS:
                raise ValueError(
                    f"{name}={value!r}: must be an integer from {least} to {MOST_TREE_ROWS - 1}."
                )
        self.ngram, self.window, self.guesses = ngram, window, guesses
        self.width, self.depth = 1 + (guesses + window) * (ngram - 1), window + ngram - 2
        if self.width > MOST_TREE_ROWS:
            given = f"ngram={ngram}, window={window}, guesses={guesses}"
            raise ValueError(f"{given}: a tree of {self.width} rows; lower them to at most {MOST_TREE_ROWS}.")

    @property
    def key(self) -> tuple:
        """Equal for proposers that may share engines."""
        return type(self), self.ngram, self.window, self.guesses

    def start(self, plan: DecodePlan, device) -> LookaheadState:
        rows, levels, columns = plan.batch_size, self.ngram - 1, self.window
        pooled = -(-POOL // columns) * columns  # a round's n-grams never lie across its end
        zeros = torch.zeros(rows, dtype=torch.int32, device=device)
        return LookaheadState(
            window=zeros[:, None, None].repeat(1, levels, columns),
            fresh=zeros[:, None].repeat(1, columns) + NONE,
            pool=zeros[:, None, None].repeat(1, pooled, self.ngram) + NONE,
            place=zeros,
            length=zeros.clone(),
        )

    def reset(self, pstate, rows) -> LookaheadState:
        cleared = super().reset(pstate, rows)
        pool = torch.where(rows[:, None, None], NONE, pstate.pool)
        return replace(cleared, pool=pool, fresh=torch.where(rows[:, None], NONE, pstate.fresh))

    def earliest(self, pstate, length) -> int:
        return 0

    def snapshot(self, pstate) -> tuple:
        return ()

    def rewind(self, pstate, kept, snapshot=None) -> LookaheadState:
        """The row's n-grams stay: those of text that is gone may still be drafted."""
        return replace(pstate, length=kept.clone())

    def ingest(self, pstate, features, ids, next_ids, count) -> LookaheadState:
        """Begin the window with the last tokens of the prompt, as any guesses; the same in any pieces."""
        text = torch.cat([pstate.window.flatten(1), ids.to(torch.int32)], dim=1)
        last = torch.arange(pstate.window[0].numel(), device=ids.device) + count[:, None]
        window = text.gather(1, last.long()).view(pstate.window.shape)
        return replace(pstate, window=window, length=pstate.length + count)

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, LookaheadState]:
        pool, levels = pstate.pool, self.ngram - 1
        slot = torch.arange(pool.shape[1], device=anchor.device, dtype=torch.int32)
        newest_first = pool.shape[1] - (pstate.place[:, None] - 1 - slot) % pool.shape[1]
        score = torch.where(pool[:, :, 0] == anchor[:, None], newest_first, 0)
        found, at = score.topk(self.guesses, dim=1)
        grams = pool.gather(1, at[..., None].expand(-1, -1, self.ngram))[:, :, 1:]
        # A missing chain has some id of the vocabulary: another one would end the tree.
        grams = torch.where((found > 0)[..., None], grams, anchor[:, None, None])
        tokens = torch.cat([grams.flatten(1), pstate.window.transpose(1, 2).flatten(1)], dim=1)
        parent = torch.tensor(self._parents(levels), dtype=torch.int32, device=anchor.device)
        whole = torch.full_like(length, self.width - 1)
        return Draft(tokens.to(torch.int32), whole, parent.expand(len(anchor), -1)), pstate

    def nodes(self, pstate, anchor, length, embed, head, request) -> NoReturn:
        raise ValueError(
            "td.Union: LookaheadProposer guesses from the picks after all rows of its own tree, which a part "
            "of a union does not get; pass it as drafter itself."
        )

    def verified(self, pstate, ids, picks) -> LookaheadState:
        if picks.shape[1] < self.width:  # a narrower round has a part of the window
            return pstate
        own = picks[:, 1 + self.guesses * (self.ngram - 1) :].unflatten(1, (self.window, -1))
        return replace(pstate, fresh=own[:, :, -1].to(torch.int32))

    def observe(self, pstate, features, ids, next_ids, count) -> LookaheadState:
        new = (count > 0) & (pstate.fresh[:, 0] != NONE)
        levels = torch.cat([pstate.window, pstate.fresh[:, None]], dim=1)
        grams = levels.transpose(1, 2).flip(1)  # those next to the anchor are the newest of a round
        pool = torch.where((new[:, None] & _known(pstate.pool, grams))[..., None], NONE, pstate.pool)
        pool = write_rows(pool, _once(grams), pstate.place, dim=1, count=new * self.window)
        window = torch.where(new[:, None, None], levels[:, 1:], levels[:, :-1])
        # The next level lies one position behind the former; accepted tokens are behind the anchor.
        column = torch.arange(self.window, device=ids.device) + (count - new.to(count.dtype))[:, None]
        column = column.clamp(max=self.window - 1).long()[:, None].expand(window.shape)
        return LookaheadState(
            window=window.gather(2, column),
            fresh=torch.full_like(pstate.fresh, NONE),
            pool=pool,
            place=(pstate.place + new * self.window).to(torch.int32) % pool.shape[1],
            length=pstate.length + count,
        )

    def _parents(self, levels: int) -> list[int]:
        """The nodes before: of chains on the anchor, then of a trunk with a column of levels at each node."""
        parents, trunk = [], -1
        for chain in range(self.guesses + self.window):
            first = len(parents)
            parents += [trunk, *range(first, first + levels - 1)]
            trunk = first if chain >= self.guesses else trunk
        return parents


def _known(pool: Int[Tensor, "B pooled ngram"], grams: Int[Tensor, "B columns ngram"]) -> Tensor:
    """Marks the n-grams of ``pool`` [B, pooled] that come anew: a draft must not hold one twice."""
    return (pool[:, :, None] == grams[:, None]).all(dim=-1).any(dim=-1)


def _once(grams: Int[Tensor, "B columns ngram"]) -> Int[Tensor, "B columns ngram"]:
    """``grams`` with `NONE` in place of each that comes again behind it."""
    at = torch.arange(grams.shape[1], device=grams.device)
    again = (grams[:, :, None] == grams[:, None]).all(dim=-1) & (at > at[:, None])
    return torch.where(again.any(dim=-1)[..., None], NONE, grams)
