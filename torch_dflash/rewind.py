"""Rows that go on with another prompt: what they hold of it stays, what stands behind is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.decode import Pair, Params, RowRequests, memories
from torch_dflash.state import DecodeState


def earliest(pair: Pair, pstate: Any, length: int) -> int:
    """The fewest tokens that `rewind` can go back to without a snapshot, after ``length`` were taken in."""
    return length if pair.target.recurrent else pair.proposer.earliest(pstate, length)


def snapshot_of(pair: Pair, state: DecodeState) -> tuple[Any, tuple]:
    """What later tokens overwrite: of the proposer, and of each layer of the target."""
    return pair.proposer.snapshot(state.proposer), tuple(layer.snapshot() for layer in state.cache)


def rewind(
    pair: Pair,
    params: Params,
    state: DecodeState,
    kept: Int[Tensor, " B"],
    requests: RowRequests,
    snapshot: Any = None,
) -> DecodeState:
    """Each row as if it had read ``kept`` [B] tokens of its text as a prompt; `prefill` goes on from there.

    Args:
        kept: at most the row's length, and at least what the pair can go back to (`earliest`).
        requests: what the rows ask for from here on.
        snapshot: `snapshot_of` the state when the row held ``kept`` tokens, where they are fewer than that.
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
