"""A verify pass by its rows, from shapes: bytes, FLOPs, and the rows at which a chip becomes compute-bound.

Bytes are those of the floor (`jax_bridge.aot.floor`: weights, K/V of the context) and of each row: its
embedding, its K/V, its logits written and read. Values between layers are left out: for 64 rows they are a
few per cent, by compiled programs (docs/tpu.md). FLOPs are two per weight and row, and those of attention.
Experts are read and multiplied as here: those that rows are expected to hit if every choice is as likely,
each for every row; ``routed_flops`` are those that routing needs. A product of a group of inputs fills the
chip's array of multipliers as far as the group is deep: ``grouped_flops`` take as many times longer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import accumulate
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_bridge.aot.compile import AbstractPair
from jax_bridge.aot.floor import CHIPS, Chip, cached_values, expert_weights, floor_of, target_weights
from jax_bridge.device_memory import bytes_of
from jax_bridge.kernels.hit_experts import expected_hits, most_rows
from jax_bridge.weights.codes import Blocks, Groups
from torch_dflash.decode import Pair

ROWS = tuple(1 << step for step in range(11))
MOST = 4096
"""Most rows in the search for a chip's turning point."""


class Work(NamedTuple):
    """Bytes and FLOPs of a pass, for all sequences together."""

    bytes: int
    flops: int
    routed_flops: int
    grouped_flops: int = 0
    group: int = 1

    def seconds(self, chip: Chip) -> float:
        """The longer of reading and computing, at the chip's published peaks."""
        return max(self.bytes / chip.bandwidth, self.computing(chip))

    def computing(self, chip: Chip) -> float:
        """Seconds of the products."""
        idle = max(1.0, chip.depth / self.group) - 1
        return (self.flops + idle * self.grouped_flops) / chip.flops


class Part(NamedTuple):
    """Elements of weights, their bytes, and elements in groups of inputs that share a scale."""

    size: int
    bytes: int
    grouped: int

    @classmethod
    def of(cls, weights: Iterable[Any]) -> Part:
        """The sizes of shapes, or formats of them."""
        found = [(prod(one.shape), bytes_of(one), isinstance(one, Blocks | Groups)) for one in weights]
        sizes = (sum(size for size, _, _ in found), sum(held for _, held, _ in found))
        return cls(*sizes, sum(size for size, _, grouped in found if grouped))


class WeightCounts(NamedTuple):
    """The target's weights that a pass reads: layers and head, and all experts; inputs of a ``group``."""

    shared: Part
    experts: Part
    count: int
    chosen: int
    group: int = 1

    def calls(self, rows: int, hidden: int) -> list[tuple[int, float]]:
        """(Rows, part of the experts) of each product of a pass."""
        whole, rest = divmod(rows, most := most_rows(hidden))
        sizes = [most] * whole + [rest] * (rest > 0)
        count = max(self.count, 1)
        return [(size, expected_hits(size, self.chosen, count) / count) for size in sizes]


def kflat(
    model: AbstractPair, contexts: Sequence[int], batches: Sequence[int], acceptance: Sequence[float] = ()
) -> dict[str, Any]:
    """Verify passes of `ROWS` rows at each context (committed tokens) and batch (sequences), for all `CHIPS`.

    Args:
        acceptance: probability that drafts 1 to d of a chain are all accepted, by depth d; none: no speed-up.

    Returns:
        Figures by name; ``cells`` has one entry per context and batch: ``rows``, ``draft`` (the drafter's
        pass), ``bound_from`` (the fewest rows at which a chip is compute-bound, None beyond `MOST`), by chip
        ``ms``, and ``speedup`` over one row without a draft. They are one chip's, whatever its memory: on a
        slice bytes and FLOPs are divided equally, and exchanges are added.
    """
    weights = _weights(model)
    cells = [_cell(model, weights, context, batch, acceptance) for context in contexts for batch in batches]
    chips = {name: chip._asdict() for name, chip in CHIPS.items()}
    return {"chips": chips, "acceptance": list(acceptance), "tokens": tokens(acceptance), "cells": cells}


def tokens(acceptance: Sequence[float]) -> list[float]:
    """Tokens per round for each of `ROWS`: accepted drafts and the target's own."""
    sums = [0.0, *accumulate(acceptance)]
    return [round(1 + sums[min(rows, len(sums)) - 1], 4) for rows in ROWS]


def work_of(pair: Pair, weights: WeightCounts, context: int, batch: int, rows: int) -> Work:
    """A verify pass of ``rows`` in each of ``batch`` sequences of ``context`` committed tokens."""
    target, config, every, item = pair.target, pair.target.config.get_text_config(), batch * rows, 2
    heads: Any = config.num_attention_heads
    share = weights.chosen / max(weights.count, 1)
    calls = weights.calls(every, config.hidden_size)
    shared, experts = weights.shared, weights.experts
    read = experts.bytes * sum(part for _, part in calls)
    cached = sum(spec.width for spec in target.specs)
    held = cached_values(target, context, rows)
    seen = context + (rows + 1) / 2  # half of the rows themselves, on average
    attended = sum((spec.k_dim + spec.v_dim) * min(spec.window or seen, seen) for spec in target.specs)
    states = 2 * sum(spec.state_bytes(item) for spec in target.specs)
    added = config.hidden_size + cached + 2 * config.vocab_size
    moved = shared.bytes + read + item * (batch * held + every * added) + batch * states

    def computed(part: float) -> int:
        return round(2 * every * (shared.size + part * experts.size + heads * attended))

    multiplied = sum(rows * part for rows, part in calls) / every
    grouped = round(2 * every * (shared.grouped + multiplied * experts.grouped))
    return Work(round(moved), computed(multiplied), computed(share), grouped, weights.group)


def draft_of(model: AbstractPair, context: int, batch: int) -> Work:
    """The drafter's pass, as wide as its own block."""
    pair = model.pair
    plan = replace(pair.plan, batch_size=batch, capacity=context)
    at = Pair(pair.target, pair.proposer, plan)
    floor = floor_of(at, model.params, context)
    every = batch * plan.block_size
    cached = 2 * batch * pair.proposer.cost(plan, context).cached
    wide = {name: jax.ShapeDtypeStruct(one.shape, jnp.bfloat16) for name, one in model.params.items()}
    flops = every * (floor_of(at, wide, context).draft - cached)  # two per weight of two bytes
    flops += floor.draft_attention_flops
    return Work(floor.draft, flops, flops)


def bound_from(pair: Pair, weights: WeightCounts, context: int, batch: int, chip: Chip) -> int | None:
    """The fewest rows at which the pass is compute-bound; None: above `MOST`."""
    low, high = 1, MOST + 1
    while low < high:
        rows = (low + high) // 2
        work = work_of(pair, weights, context, batch, rows)
        bound = work.computing(chip) > work.bytes / chip.bandwidth
        low, high = (low, rows) if bound else (rows + 1, high)
    return low if low <= MOST else None


def _weights(model: AbstractPair) -> WeightCounts:
    reads = target_weights(model.pair, model.params)
    stacks = expert_weights(model.pair, reads)
    count, chosen = max(stacks.values(), default=(0, 0))
    shared = Part.of(one for name, one in reads.items() if name not in stacks)
    groups = {one.array.shape[-2] for one in reads.values() if isinstance(one, Blocks | Groups)}
    experts = Part.of(reads[name] for name in stacks)
    return WeightCounts(shared, experts, count, chosen, min(groups, default=1))


def _cell(
    model: AbstractPair, weights: WeightCounts, context: int, batch: int, acceptance: Sequence[float]
) -> dict[str, Any]:
    pair = model.pair
    work = [work_of(pair, weights, context, batch, rows) for rows in ROWS]
    draft, tokens_per_pass = draft_of(model, context, batch), tokens(acceptance)
    took = {name: [one.seconds(chip) for one in work] for name, chip in CHIPS.items()}

    def speedups(name: str) -> list[float]:
        own, drafting = took[name], draft.seconds(CHIPS[name])
        rounds = [own[0], *(each + drafting for each in own[1:])]
        return [round(own[0] * gain / each, 3) for gain, each in zip(tokens_per_pass, rounds, strict=True)]

    return {
        "context": context,
        "batch": batch,
        "rows": [{"rows": rows} | one._asdict() for rows, one in zip(ROWS, work, strict=True)],
        "draft": draft._asdict(),
        "bound_from": {name: bound_from(pair, weights, context, batch, chip) for name, chip in CHIPS.items()},
        "ms": {name: [round(1e3 * each, 4) for each in own] for name, own in took.items()},
        "speedup": {name: speedups(name) for name in CHIPS} if acceptance else {},
    }
