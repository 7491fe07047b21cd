"""Compiled and counted steps: a prompt chunk, a round, the loop over rounds, a round's two passes alone.

The passes split a round's work between target and proposer without a remainder, so that their bytes can be
held against a floor each: the proposer's includes taking in the features that the target's leaves.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from torch import Tensor

from jax_bridge.lower import lower, lower_prefill, lower_rounds
from torch_dflash import decode as steps
from torch_dflash.decode import Pair, Params, decode_round
from torch_dflash.ops.windows import read_rows, write_rows
from torch_dflash.state import DecodeState, Draft


def verify(pair: Pair, params: Params, state: DecodeState) -> tuple[DecodeState, Tensor | None]:
    """The target on M rows from the anchor, and its picks: (state, tapped features [B, M, n*H])."""
    return pair.run(_verify, params, state)


def draft(pair: Pair, params: Params, state: DecodeState, features: Tensor | None) -> DecodeState:
    """The proposer's share of a round: a draft, then the ``features`` of the rows verified after it."""
    return pair.run(_draft, params, state, features)


def _verify(pair: Pair, state: DecodeState) -> tuple[DecodeState, Tensor | None]:
    drafts = read_rows(state.tokens, state.committed, pair.plan.verify_width - 1)
    seen = steps.verify(pair, state, Draft(drafts, state.length * 0))
    tokens = write_rows(state.tokens, seen.picks, state.committed, dim=1)
    return replace(state, cache=seen.cache, tokens=tokens), seen.features


def _draft(pair: Pair, state: DecodeState, features: Tensor | None) -> DecodeState:
    drafted, pstate = steps.draft(pair, state)
    tokens = write_rows(state.tokens, drafted.tokens, state.committed, dim=1)
    ids = read_rows(tokens, state.length, pair.plan.verify_width + 1)
    pstate = pair.proposer.observe(pstate, features, ids[:, :-1], ids[:, 1:], drafted.valid)
    return replace(state, tokens=tokens, proposer=pstate)


STEPS: dict[str, Callable[[Pair], Callable]] = {
    "prefill": lower_prefill,
    "round": lambda pair: lower(partial(decode_round, pair)),
    "chunk": lower_rounds,
    "verify": lambda pair: lower(partial(verify, pair)),
    "draft": lambda pair: lower(partial(draft, pair)),
}
"""Functions of ``(params, state)``; the state is donated.

``prefill`` takes a `PromptChunk` besides, and ``draft`` features (`feature_shape`).
"""


def feature_shape(pair: Pair) -> tuple[int, int, int] | None:
    """[B, M, n*H] of what the target's pass hands to the proposer; None if it taps nothing."""
    taps: Any = pair.proposer.taps
    rows = pair.plan.batch_size, pair.plan.verify_width
    return (*rows, len(taps) * pair.target.hidden_size) if taps else None
