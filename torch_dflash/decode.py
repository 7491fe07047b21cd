"""The decoding round, as pure ``state -> state`` functions: draft, verify, accept, commit.

Eagerly they are the reference; `jax_bridge` lowers the same functions to one XLA program. `rows` begins a
state, feeds it prompts and rewinds it.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from torch_dflash.accept import accept_chain, accept_tree, drafted_by, known_draft, trim_at_stop
from torch_dflash.cache.allocate import check_specs
from torch_dflash.guards.reentry import check_outside
from torch_dflash.ops.trees import Tree, read_tree, rows_at, take_rows
from torch_dflash.ops.windows import write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.processors.interface import Text, process
from torch_dflash.proposers.base import Proposer, take_in
from torch_dflash.record import note_picks
from torch_dflash.sampling import pick_tokens, warped_logits
from torch_dflash.state import DecodeState, Draft, DraftRequest, Sampling
from torch_dflash.targets.adapter import Target
from torch_dflash.targets.binding import BoundWeights

Params = dict[str, Tensor]


class Pair(nn.Module):
    """Target and proposer under one root without weights, which each call binds. ``plan`` is static."""

    def __init__(self, target: Target, proposer: Proposer, plan: DecodePlan):
        super().__init__()
        check_specs(target.specs, plan)
        target.check_taps(proposer.taps)
        self.target = target
        self.proposer: Any = proposer
        self.plan = plan
        self._bound = BoundWeights(self)

    def forward(self, step, *args):
        return step(self, *args)

    def run(self, step, params: Params, *args):
        """``step(self, *args)`` with ``params`` in place of the weights; one thread at a time."""
        return self._bound.call(self, params, (step, *args))

    def check_free(self) -> None:
        """Raise ``RuntimeError`` if this thread is inside a step of this pair."""
        check_outside(self, self._bound.lock)


def decode_round(
    pair: Pair, params: Params, state: DecodeState, width: int | None = None, fewest: int = 1
) -> DecodeState:
    """Draft, verify, accept, commit: every live row gains between 1 and M tokens.

    ``width``: rows M of this round's verify pass; None: the plan's ``verify_width``, the most. Rounds of
    every width share one state; with 1 nothing is drafted, and the proposer still reads the row.
    ``fewest``: as in `verify`.
    """
    return pair.run(_decode_round, params, state, width or pair.plan.verify_width, fewest)


class Verified(NamedTuple):
    """The target on M rows: ``ids`` [B, M], its ``logits`` [B, M, V] and ``picks`` [B, M] after each row.

    ``features`` [B, M, n*H] are the tapped layers' outputs, None without taps; ``cache`` the layers after
    the pass. ``scores`` [B, M, V] are None unless the plan keeps them; ``tree`` is None for a chain.
    """

    ids: Int[Tensor, "B M"]
    logits: Tensor
    picks: Int[Tensor, "B M"]
    features: Tensor | None
    cache: tuple
    scores: Tensor | None
    tree: Tree | None = None

    def along(self, path: Tensor) -> Verified:
        """The rows ``path`` [B, path]; the layers are not committed yet."""
        rows = (self.ids, self.logits, self.picks, self.features, self.scores)
        ids, logits, picks, features, scores = (None if a is None else take_rows(a, path) for a in rows)
        return Verified(cast(Any, ids), cast(Any, logits), cast(Any, picks), features, self.cache, scores)


def draft(pair: Pair, state: DecodeState, width: int | None = None) -> tuple[Draft, Any]:
    """The proposer's pass: (a draft after each row's anchor, its state); ``width`` as in `verify`."""
    target, proposer, plan = pair.target, pair.proposer, pair.plan
    own = state.anchor.clone(), state.length.clone()  # copies, which the proposer may overwrite
    request = DraftRequest(state.sampling, width or plan.verify_width)
    proposed = proposer.draft(state.proposer, *own, target.embed, target.head, request)
    drafted, pstate = drafted_by(proposer, proposed)
    return known_draft(drafted, plan, target.vocab_size), pstate


def skip(pair: Pair, state: DecodeState) -> tuple[Draft, Any]:
    """Replaces `draft` in a round of one row: (no draft, the proposer's state, ready to read rows)."""
    target, own = pair.target, (state.anchor.clone(), state.length.clone())
    pstate = pair.proposer.skip(state.proposer, *own, target.embed, target.head)
    return Draft(tokens=state.anchor[:, None][:, :0], valid=torch.zeros_like(state.length)), pstate


def verify(
    pair: Pair, state: DecodeState, drafted: Draft, width: int | None = None, fewest: int = 1
) -> Verified:
    """The target's pass over the anchor and the first M - 1 drafted tokens, and its pick after each.

    ``fewest``: rows of the pass at least; rows after the first M are computed and dropped.
    """
    plan = pair.plan
    width = width or plan.verify_width
    ids = torch.cat([state.anchor[:, None], drafted.tokens[:, : width - 1]], dim=1)
    spare = ids[:, -1:].expand(-1, max(fewest - width, 0))
    rows = torch.cat([ids, spare], dim=1)
    tree = None if drafted.parent is None else _tree(plan, drafted, rows)
    out = pair.target(rows, state.length, state.cache, pair.proposer.taps, state.page_table, tree=tree)
    own, tree = out.logits[:, :width], None if tree is None else tree.cut(width)
    tokens = state.tokens
    if plan.processors and tree is None:
        tokens = write_rows(tokens, ids, state.length, dim=1)
    text = Text(tokens, rows_at(state.committed, width, tree), ids, tree, plan.depth or 0)
    picks, scores = pick(plan, state.rules, text, own, state.sampling)
    features = None if out.features is None else out.features[:, :width]
    return Verified(ids, own, picks, features, out.cache, scores, tree)


def commit(pair: Pair, state: DecodeState, drafted: Draft, pstate: Any, seen: Verified) -> DecodeState:
    """Keep the drafts that equal the target's picks, and the next pick, up to a stop id or the limit."""
    rows = seen.ids, seen.picks
    seen, accepted, path = _accepted(pair.plan, drafted, seen)
    kept, stopped = trim_at_stop(seen.picks, accepted, state.stop_ids)
    remaining = state.limit - state.committed
    count = torch.where(state.done, 0, torch.minimum(kept, remaining))
    return replace(
        state,
        tokens=write_rows(state.tokens, seen.picks, state.committed, dim=1),
        length=state.length + count,
        done=state.done | (stopped & (kept <= remaining)) | (kept >= remaining),
        cache=tuple(layer.commit(count, path) for layer in seen.cache),
        proposer=take_in(
            pair.proposer.observe,
            pair.proposer.verified(pstate, *rows),
            *(seen.features, seen.ids, seen.picks, count, pair.target.embed),
        ),
        rules=tuple(
            processor.observe(memory, seen.ids, count)
            for processor, memory in zip(pair.plan.processors, state.rules, strict=True)
        ),
        accepted=write_rows(state.accepted, kept[:, None].to(torch.uint8), state.rounds, dim=1),
        rounds=state.rounds + (~state.done).to(torch.int32),
        record=note_picks(state.record, seen.picks, seen.logits, seen.scores, state.committed),
    )


def _tree(plan: DecodePlan, drafted: Draft, rows: Tensor) -> Tree:
    nodes = rows.shape[1] - 1
    parent: Any = drafted.parent
    parent = parent[:, :nodes]
    alone = torch.full_like(rows[:, parent.shape[1] + 1 :], -1)  # rows to be dropped
    valid = drafted.valid.clamp(max=parent.shape[1])
    return read_tree(torch.cat([parent.to(alone.dtype), alone], dim=1), valid, plan.depth or 1)


def _accepted(plan: DecodePlan, drafted: Draft, seen: Verified) -> tuple[Verified, Tensor, Tensor | None]:
    """(The rows that a round may commit, the number that it commits, their path in a tree)."""
    if seen.tree is None:
        return seen, accept_chain(drafted, seen.picks), None
    path, count = accept_tree(seen.ids[:, 1:], seen.tree, seen.picks, plan.depth or 1)
    return seen.along(path), count, path


def pick(
    plan: DecodePlan, rules: tuple, text: Text, logits: Tensor, sampling: Sampling
) -> tuple[Tensor, Tensor | None]:
    """(The token after each row of ``text``, the scores if the plan keeps them)."""
    unscaled = process(plan.processors, rules, text, logits)
    warp = partial(process, plan.processors, rules, text, scaled=True)
    picks = pick_tokens(unscaled, text.length, sampling, plan.filters, warp)
    kept = "output_scores" in plan.outputs
    return picks, warped_logits(unscaled, sampling, plan.filters, warp) if kept else None


def _decode_round(pair: Pair, state: DecodeState, width: int, fewest: int) -> DecodeState:
    drafted, pstate = draft(pair, state, width) if width > 1 else skip(pair, state)
    seen = verify(pair, state, drafted, width, fewest)
    return commit(pair, state, drafted, pstate, seen)
