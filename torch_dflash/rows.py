"""Rows of a state: begin, feed prompts, admit other requests, rewind. `decode` has the rounds."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dflash.cache.allocate import empty_page_table
from torch_dflash.cache.paged import PagedLayer
from torch_dflash.decode import Pair, Params, pick
from torch_dflash.ops.windows import clear_rows, put_slot, take_slot, write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.processors.interface import Text
from torch_dflash.proposers.base import take_in
from torch_dflash.pytrees import register_state
from torch_dflash.record import note_picks, start_record
from torch_dflash.state import DecodeState, PromptChunk, Sampling


@register_state
@dataclass(frozen=True)
class RowRequests:
    """Options of each row of a new batch (fields as in `DecodeState`). ``done`` marks unused rows."""

    limit: Int[Tensor, " B"]
    stop_ids: Int[Tensor, "B E"]
    done: Bool[Tensor, " B"]
    sampling: Sampling
    rules: tuple  # values for each processor of the plan

    @classmethod
    def idle(cls, plan: DecodePlan, device: Any = "cpu") -> RowRequests:
        """A batch without a used row."""
        unused = [None] * plan.batch_size, [0] * plan.batch_size
        rules = tuple(processor.values(*unused) for processor in plan.processors)
        with torch.device(device):
            zeros, floats = torch.zeros(plan.batch_size, dtype=torch.int32), torch.zeros(plan.batch_size)
            return cls(
                limit=zeros,
                stop_ids=torch.full((plan.batch_size, plan.stop_slots), -1, dtype=torch.int32),
                done=torch.ones(plan.batch_size, dtype=torch.bool),
                sampling=Sampling(
                    temperature=floats, top_k=zeros, top_p=floats + 1, min_p=floats, seed=zeros
                ),
                rules=pytree.tree_map(lambda leaf: leaf.to(device), rules),
            )


def begin(pair: Pair, params: Params, rows: RowRequests) -> DecodeState:
    """An empty state: no token committed, every buffer zero."""
    return pair.run(_begin, params, rows)


def prefill(pair: Pair, params: Params, state: DecodeState, chunk: PromptChunk) -> DecodeState:
    """Append a piece of each row's prompt at any length; pick the next token where the prompt ends."""
    return pair.run(_prefill, params, state, chunk)


def reset(
    pair: Pair, params: Params, state: DecodeState, rows: Bool[Tensor, " B"], requests: RowRequests
) -> DecodeState:
    """Begin other requests in the rows marked in ``rows``; the others stay as they are."""
    return pair.run(_reset, params, state, rows, requests)


def admit(
    pair: Pair, params: Params, state: DecodeState, row: Int[Tensor, ""], requests: RowRequests
) -> DecodeState:
    """Begin another request in ``row``; ``requests`` has a batch of one. The row has no pages then."""
    return pair.run(_admit, params, state, row, requests)


def feed(
    pair: Pair, params: Params, state: DecodeState, row: Int[Tensor, ""], chunk: PromptChunk
) -> DecodeState:
    """`prefill` of ``row`` alone: ``chunk`` has a batch of one, and the pass computes one row."""
    return pair.run(_feed, params, state, row, chunk)


def take(state: DecodeState, row: Int[Tensor, ""]) -> DecodeState:
    """A state of ``row`` alone. Pools of pages belong to all rows and go along whole."""

    def one(leaf: Any) -> Any:
        return take_slot(leaf, row) if isinstance(leaf, Tensor) else leaf

    return pytree.tree_map(one, state, is_leaf=_is_pool)


def put(state: DecodeState, part: DecodeState, row: Int[Tensor, ""]) -> DecodeState:
    """``state`` with ``part``, a state of one row, as its ``row``; consumes both. Leaves share no memory."""

    def one(old: Any, new: Any) -> Any:
        if _is_pool(old) or not isinstance(old, Tensor):
            return new
        return put_slot(old, new, row)

    return pytree.tree_map(one, state, part, is_leaf=_is_pool)


def _is_pool(node: Any) -> bool:
    return isinstance(node, PagedLayer)


def _admit(pair: Pair, state: DecodeState, row: Tensor, requests: RowRequests) -> DecodeState:
    part = take(state, row)
    return put(state, _reset(pair, part, torch.ones_like(part.done), requests), row)


def _feed(pair: Pair, state: DecodeState, row: Tensor, chunk: PromptChunk) -> DecodeState:
    return put(state, _prefill(pair, take(state, row), chunk), row)


def _prefill(pair: Pair, state: DecodeState, chunk: PromptChunk) -> DecodeState:
    target, proposer = pair.target, pair.proposer
    ids, count = chunk.ids, chunk.count
    fed, last = count > 0, (count - 1).clamp(min=0)

    # A row without a piece may have any length: it writes to page 0, which no row owns.
    table = state.page_table
    table = None if table is None else torch.where(fed[:, None], table, 0)
    out = target(ids, state.length, state.cache, proposer.taps, table, count)
    length = state.length + count
    # A row without a piece keeps its tokens: its anchor is where the piece would be written.
    tokens = write_rows(state.tokens, ids, state.length, dim=1, count=count)
    rules = tuple(
        processor.read(memory, ids, count)
        for processor, memory in zip(pair.plan.processors, state.rules, strict=True)
    )
    picks, scores = pick(pair.plan, rules, Text(tokens, length[:, None]), out.logits, state.sampling)
    ended = fed & (chunk.following < 0)
    bonus = torch.where(ended, picks[:, 0], chunk.following)

    column = torch.arange(ids.shape[1], device=ids.device, dtype=ids.dtype)
    next_ids = torch.where(column == last[:, None], bonus[:, None], torch.roll(ids, -1, dims=1))
    tokens = write_rows(tokens, bonus[:, None], length, dim=1, count=fed.to(count.dtype))

    hit_stop = (bonus[:, None] == state.stop_ids).any(dim=1)
    return replace(
        state,
        tokens=tokens,
        length=length,
        done=torch.where(ended, hit_stop | (length + 1 >= state.limit), state.done),
        cache=out.cache,
        proposer=take_in(proposer.ingest, state.proposer, out.features, ids, next_ids, count, target.embed),
        rules=rules,
        record=note_picks(state.record, picks, out.logits, scores, length, ended.to(count.dtype)),
    )


def _reset(pair: Pair, state: DecodeState, rows: Bool[Tensor, " B"], requests: RowRequests) -> DecodeState:
    """Clear tokens, caches and the proposer's state of the former requests.

    A row of a paged cache loses its pages, which the host may assign again.
    """

    def chosen(fresh: Tensor, old: Tensor) -> Tensor:
        return torch.where(rows.view(-1, *[1] * (old.ndim - 1)), fresh, old)

    def cleared(old: Tensor | None) -> Any:
        return None if old is None else clear_rows(old, rows)

    return DecodeState(
        tokens=cleared(state.tokens),
        length=cleared(state.length),
        limit=chosen(requests.limit, state.limit),
        stop_ids=chosen(requests.stop_ids, state.stop_ids),
        done=chosen(requests.done, state.done),
        sampling=pytree.tree_map(chosen, requests.sampling, state.sampling),
        cache=tuple(layer.reset(rows) for layer in state.cache),
        page_table=cleared(state.page_table),
        proposer=pair.proposer.reset(state.proposer, rows),
        rules=pytree.tree_map(chosen, memories(pair, requests), state.rules),
        accepted=cleared(state.accepted),
        rounds=cleared(state.rounds),
        record={name: clear_rows(old, rows) for name, old in state.record.items()},
    )


def _begin(pair: Pair, rows: RowRequests) -> DecodeState:
    plan, device = pair.plan, rows.done.device
    zeros = torch.zeros(plan.batch_size, dtype=torch.int32, device=device)
    shape = (plan.batch_size, plan.slots)
    return DecodeState(
        tokens=torch.zeros(shape, dtype=torch.int32, device=device),
        length=zeros,
        limit=rows.limit,
        stop_ids=rows.stop_ids,
        done=rows.done,
        sampling=rows.sampling,
        cache=pair.target.start(plan),
        page_table=empty_page_table(plan, device),
        proposer=pair.proposer.start(plan, device),
        rules=memories(pair, rows),
        accepted=torch.zeros(shape, dtype=torch.uint8, device=device),
        rounds=zeros.clone(),
        record=start_record(plan, pair.target.vocab_size, device),
    )


def memories(pair: Pair, rows: RowRequests) -> tuple:
    """The processors' memories of rows without tokens."""
    return tuple(
        processor.start(values, pair.target.vocab_size)
        for processor, values in zip(pair.plan.processors, rows.rules, strict=True)
    )


def earliest(pair: Pair, pstate: Any, length: int) -> int:
    """The fewest tokens that `rewind` can go back to from ``length`` without a snapshot."""
    return length if pair.target.recurrent else pair.proposer.earliest(pstate, length)


def snapshot_of(pair: Pair, state: DecodeState) -> tuple[Any, tuple]:
    """The values that later tokens overwrite: (of the proposer, of each layer of the target)."""
    return pair.proposer.snapshot(state.proposer), tuple(layer.snapshot() for layer in state.cache)


def rewind(
    pair: Pair,
    params: Params,
    state: DecodeState,
    kept: Int[Tensor, " B"],
    requests: RowRequests,
    snapshot: Any = None,
) -> DecodeState:
    """Each row after the first ``kept`` [B] tokens of its text, read as a prompt; `prefill` continues.

    Args:
        kept: at most the row's length, and at least `earliest` without a snapshot.
        requests: the rows' options from here on.
        snapshot: `snapshot_of` the state at ``kept`` tokens, where they are fewer than `earliest`.
    """
    return pair.run(_rewind, params, state, kept, requests, snapshot)


def _rewind(
    pair: Pair, state: DecodeState, kept: Tensor, requests: RowRequests, snapshot: Any
) -> DecodeState:
    own, layers = (None, None) if snapshot is None else snapshot
    rules = tuple(
        processor.read(memory, state.tokens, kept)
        for processor, memory in zip(pair.plan.processors, memories(pair, requests), strict=True)
    )
    return replace(
        state,
        length=kept.clone(),
        limit=requests.limit,
        stop_ids=requests.stop_ids,
        done=requests.done,
        sampling=requests.sampling,
        cache=state.cache if layers is None else _restored(state.cache, layers),
        proposer=pair.proposer.rewind(state.proposer, kept, own),
        rules=rules,
        accepted=torch.zeros_like(state.accepted),
        rounds=torch.zeros_like(state.rounds),
    )


def _restored(layers: tuple, snapshots: tuple) -> tuple:
    return tuple(layer.restore(one) for layer, one in zip(layers, snapshots, strict=True))
