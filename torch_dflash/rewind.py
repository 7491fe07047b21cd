"""Rows that go on with another prompt: what they hold of it stays, what stands behind is forgotten."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.decode import Pair, Params, RowRequests, memories
from torch_dflash.state import DecodeState


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
        kept: at most the row's length, and at least what the proposer can go back to (`Proposer.earliest`).
        requests: what the rows ask for from here on.
        snapshot: of the proposer, where it is older than that: taken when the row held ``kept`` tokens.
    """
    return pair.run(_rewind, params, state, kept, requests, snapshot)


def _rewind(
    pair: Pair, state: DecodeState, kept: Tensor, requests: RowRequests, snapshot: Any
) -> DecodeState:
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
        proposer=pair.proposer.rewind(state.proposer, kept, snapshot),
        rules=rules,
        accepted=torch.zeros_like(state.accepted),
        rounds=torch.zeros_like(state.rounds),
    )
