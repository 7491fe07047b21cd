"""Prefill and the decoding round: the whole algorithm, as pure ``state -> state`` functions.

Run eagerly they are the reference; `jax_bridge` lowers these same functions to one XLA program.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from torch_dflash.accept import accept_chain, known_chain, trim_at_stop
from torch_dflash.cache.dense import check_specs
from torch_dflash.checks import check_dtype
from torch_dflash.ops.windows import read_rows, write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.base import Proposer
from torch_dflash.pytrees import register_state
from torch_dflash.sampling import pick_tokens
from torch_dflash.state import DecodeState, PromptChunk, Sampling
from torch_dflash.target.adapter import Target

Params = dict[str, Tensor]


class Pair(nn.Module):
    """Target and proposer under one root, so that one functional call binds all weights.

    The modules hold no weights of their own (meta tensors); ``plan`` holds what is static.
    """

    def __init__(self, target: Target, proposer: Proposer, plan: DecodePlan):
        super().__init__()
        check_specs(target.specs, plan)
        target.check_taps(proposer.taps)
        self.target = target
        self.proposer: Any = proposer
        self.plan = plan
        self._lock = threading.Lock()  # functional_call swaps weights in and out of these modules

    def forward(self, step, *args):
        return step(self, *args)

    def run(self, step, params: Params, *args):
        """``step(self, *args)`` with ``params`` in place of the weights; one thread at a time."""
        with self._lock, torch.no_grad():
            return torch.func.functional_call(self, params, (step, *args))


@register_state
@dataclass(frozen=True)
class RowRequests:
    """What each row of a new batch asks for (fields as in `DecodeState`). ``done`` marks unused rows."""

    prompt_length: Int[Tensor, " B"]
    limit: Int[Tensor, " B"]
    stop_ids: Int[Tensor, "B E"]
    done: Bool[Tensor, " B"]
    sampling: Sampling


def begin(pair: Pair, params: Params, rows: RowRequests) -> DecodeState:
    """An empty state: nothing committed, every buffer zero."""
    return pair.run(_begin, params, rows)


def prefill(pair: Pair, params: Params, state: DecodeState, chunk: PromptChunk) -> DecodeState:
    """Append a piece of each row's prompt, from any length; where the prompt ends, pick the next token."""
    return pair.run(_prefill, params, state, chunk)


def decode_round(pair: Pair, params: Params, state: DecodeState) -> DecodeState:
    """Draft, verify, accept, commit: every live row gains between 1 and M tokens."""
    return pair.run(_decode_round, params, state)


def _decode_round(pair: Pair, state: DecodeState) -> DecodeState:
    target, proposer, plan = pair.target, pair.proposer, pair.plan
    width = plan.verify_width
    check_dtype("target", pytree.tree_leaves(state.cache)[0].dtype, target.dtype)

    anchor = read_rows(state.tokens, state.length, 1)
    own = anchor[:, 0].clone(), state.length.clone()  # the proposer's: it may write into them
    draft, pstate = proposer.propose(state.proposer, *own, target.embed, target.head)
    draft = known_chain(draft, plan, target.vocab_size)

    ids = torch.cat([anchor, draft.tokens[:, : width - 1]], dim=1)
    out = target(ids, state.length, state.cache, proposer.taps, state.pages)
    following = state.length[:, None] + 1 + torch.arange(width, device=ids.device, dtype=ids.dtype)
    picks = pick_tokens(out.logits, following, state.sampling, plan.filters)

    commit = accept_chain(draft, picks)
    kept, stopped = trim_at_stop(picks, commit.count, state.stop_ids)
    room = state.limit - (state.length + 1)
    count = torch.where(state.done, 0, torch.minimum(kept, room))
    commit = replace(commit, count=count)
    live = (~state.done).to(torch.int32)

    return replace(
        state,
        tokens=write_rows(state.tokens, picks, state.length + 1, dim=1),
        length=state.length + count,
        done=state.done | (stopped & (kept <= room)) | (kept >= room),
        cache=tuple(layer.commit(commit) for layer in out.cache),
        proposer=proposer.observe(pstate, out.features, ids, picks, count),
        accepted=write_rows(state.accepted, kept[:, None].to(torch.uint8), state.rounds, dim=1),
        rounds=state.rounds + live,
    )


def _prefill(pair: Pair, state: DecodeState, chunk: PromptChunk) -> DecodeState:
    target, proposer = pair.target, pair.proposer
    ids, count = chunk.ids, chunk.count
    fed, last = count > 0, (count - 1).clamp(min=0)
    check_dtype("target", pytree.tree_leaves(state.cache)[0].dtype, target.dtype)

    # A row without a piece may stand anywhere: it writes to the write-off page.
    pages = None if state.pages is None else torch.where(fed[:, None], state.pages, 0)
    out = target(ids, state.length, state.cache, proposer.taps, pages, count)
    length = state.length + count
    pick = pick_tokens(out.logits, length[:, None], state.sampling, pair.plan.filters)[:, 0]
    ended = fed & (chunk.following < 0)
    bonus = torch.where(ended, pick, chunk.following)

    column = torch.arange(ids.shape[1], device=ids.device, dtype=ids.dtype)
    next_ids = torch.where(column == last[:, None], bonus[:, None], torch.roll(ids, -1, dims=1))
    # A row without a piece keeps what it holds: its anchor stands where the piece would be written.
    tokens = write_rows(state.tokens, ids, state.length, dim=1, count=count)
    tokens = write_rows(tokens, bonus[:, None], length, dim=1, count=fed.to(count.dtype))

    hit_stop = (bonus[:, None] == state.stop_ids).any(dim=1)
    return replace(
        state,
        tokens=tokens,
        length=length,
        done=torch.where(ended, hit_stop | (length + 1 >= state.limit), state.done),
        cache=out.cache,
        proposer=proposer.observe(state.proposer, out.features, ids, next_ids, count),
    )


def _begin(pair: Pair, rows: RowRequests) -> DecodeState:
    plan, device = pair.plan, rows.done.device
    zeros = torch.zeros(plan.batch_size, dtype=torch.int32, device=device)
    shape = (plan.batch_size, plan.slots)
    return DecodeState(
        tokens=torch.zeros(shape, dtype=torch.int32, device=device),
        length=zeros,
        prompt_length=rows.prompt_length,
        limit=rows.limit,
        stop_ids=rows.stop_ids,
        done=rows.done,
        sampling=rows.sampling,
        cache=pair.target.start(plan),
        pages=_no_pages(plan, device),
        proposer=pair.proposer.start(plan, device),
        accepted=torch.zeros(shape, dtype=torch.uint8, device=device),
        rounds=zeros.clone(),
    )


def _no_pages(plan: DecodePlan, device) -> Tensor | None:
    if plan.cache == "static":
        return None
    return torch.zeros(plan.batch_size, plan.row_pages, dtype=torch.int32, device=device)
