"""The least bytes that a pass must read from HBM, its FLOPs, and the chips' peaks.

The floor of a pass is its weights once, the K/V of the context once, and recurrent states once read and once
written; modules that do not run for text, such as a tower for images, are left out. Target and drafter share
one head, and a round reads it in both passes, because the second pass starts after the first: a round's floor
is the sum of both, the head twice, and once more for each further pass of a drafter that makes several. Small
items are left out: activations, the block's own K/V, and the rows
that a pass reads of the embedding and of a selector's codebooks. A tied embedding is the head. A prompt chunk
has hundreds of rows, so there these items are less small; its floor leaves them out too.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
from torch import nn

from jax_bridge.device_memory import bytes_of
from jax_bridge.kernels.hit_experts import fullest_hits
from jax_bridge.weights.layout import lookups_of
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan

Shapes = dict[str, Any]
"""By name a `jax.ShapeDtypeStruct`, or a format of them."""


class Chip(NamedTuple):
    """Published peaks of one chip: dense bf16 FLOP/s and HBM bytes/s; inputs of its array of multipliers."""

    flops: float
    bandwidth: float
    depth: int = 128


CHIPS = {
    "v4": Chip(275e12, 1228e9),
    "v5e": Chip(197e12, 819e9),
    "v5p": Chip(459e12, 2765e9),
    "v6e": Chip(918e12, 1640e9, 256),
}


def chip_of(topology: str) -> Chip:
    """Peaks of the chip of a topology such as "v5p:2x2x1".

    Raises:
        ValueError: a generation without published peaks here.
    """
    return CHIPS[generation_of(topology)]


def generation_of(topology: str) -> str:
    """The key of `CHIPS` at the start of a topology; raises as `chip_of`."""
    generation = topology.partition(":")[0]
    if generation not in CHIPS:
        raise ValueError(
            f"topology={topology!r}: no peak figures for {generation!r}; name one of {', '.join(CHIPS)} and "
            "its shape, such as v5p:2x2x1."
        )
    return generation


@dataclass(frozen=True)
class Floor:
    """Least bytes that the passes of one round read, and the FLOPs of attention over the context."""

    verify: int
    draft: int
    verify_attention_flops: int
    draft_attention_flops: int

    @property
    def round(self) -> int:
        """Both passes: each reads the head."""
        return self.verify + self.draft


class Shares(NamedTuple):
    """Numbers of chips that K/V heads of target and drafter, and recurrent states, are cut over; of all."""

    target: int = 1
    drafter: int = 1
    states: int = 1
    chips: int = 1


ALONE = Shares()


def floor_of(pair: Pair, params: Shapes, context: int, shares: Shares = ALONE) -> Floor:
    """The floor of ``pair``'s passes with ``context`` committed tokens in every row.

    Of a mixture the experts count that ``B * M`` rows are expected to hit, if every choice is as likely. For
    one chip of a slice, ``params`` are its parts, and hit experts are those of the chip with most of them.
    """
    plan, weights, names = pair.plan, _sizes(params), _names(pair)
    head = names[id(pair.target.model.get_output_embeddings().weight)]
    tables = lookups_of(pair) | _embeddings(pair)
    drafter = [size for name, size in weights.items() if name.startswith("proposer.") and name not in tables]
    cost = pair.proposer.cost(plan, context)
    read = weights[head] * (bool(drafter) and not _own_head(pair))
    looped = sum(weights[names[id(weight)]] for part in cost.looped for weight in part.parameters())
    return Floor(
        verify=_target_bytes(pair, params, context, plan.verify_width, shares),
        draft=sum(drafter)
        + read
        + (cost.passes - 1) * (looped + read)
        + plan.batch_size * jnp.dtype(params[head].dtype).itemsize * cost.cached // shares.drafter,
        verify_attention_flops=_attention_flops(plan, pair.target, context) // shares.target,
        draft_attention_flops=cost.flops // shares.drafter,
    )


def prefill_floor(pair: Pair, params: Shapes, context: int, rows: int) -> int:
    """Least bytes of a prompt chunk of ``rows`` per sequence that ends at ``context`` tokens.

    They are the target's as in `floor_of`, and the drafter's weights that turn features into K and V.
    """
    weights, names = _sizes(params), _names(pair)
    parts = pair.proposer.cost(pair.plan, context).prompt
    used = (weights[names[id(weight)]] for part in parts for weight in part.parameters())
    return _target_bytes(pair, params, context, rows) + sum(used)


def _embeddings(pair: Pair) -> set[str]:
    found = (name for name, module in pair.named_modules() if isinstance(module, nn.Embedding))
    return {f"{name}.weight" for name in found if name.startswith("proposer.")}


def _own_head(pair: Pair) -> bool:
    config = getattr(getattr(pair.proposer, "drafter", None), "config", None)
    return getattr(config, "own_head", False)


def _sizes(params: Shapes) -> dict[str, int]:
    return {name: bytes_of(shape) for name, shape in params.items()}


def _names(pair: Pair) -> dict[int, str]:
    return {id(weight): name for name, weight in pair.named_parameters()}


def _target_bytes(pair: Pair, params: Shapes, context: int, rows: int, shares: Shares = ALONE) -> int:
    """Bytes that the target reads for ``rows`` per sequence, the last at ``context``; states count twice."""
    batch, target = pair.plan.batch_size, pair.target
    weights = target_weights(pair, params)
    reads = _sizes(weights)
    for name, (count, chosen) in expert_weights(pair, weights, shares.chips).items():
        own = weights[name].shape[0]
        reads[name] = round(reads[name] * fullest_hits(batch * rows, chosen, count, count // own) / own)
    cached = cached_values(target, context, rows)
    item = jnp.dtype(params[_names(pair)[id(target.model.get_input_embeddings().weight)]].dtype).itemsize
    states = sum(spec.state_bytes(item) for spec in target.specs)
    held = item * cached // shares.target + 2 * states // shares.states
    return sum(reads.values()) + batch * held


def target_weights(pair: Pair, params: Shapes) -> Shapes:
    """The target's weights that a pass over text reads whole; an untied embedding is none of them."""
    target, names = pair.target, _names(pair)
    embedding, head = target.model.get_input_embeddings(), target.model.get_output_embeddings()
    idle = tuple(f"target.model.{path}." for path in target.blocks.idle)
    looked_up = names[id(embedding.weight)] if embedding.weight is not head.weight else None
    return {
        name: shape
        for name, shape in params.items()
        if name.startswith("target.") and not name.startswith(idle) and name != looked_up
    }


def expert_weights(pair: Pair, weights: Shapes, chips: int = 1) -> dict[str, tuple[int, int]]:
    """(Number of experts, experts per row) by the names of the ``weights`` that hold experts.

    ``weights`` are whole, or parts on one of ``chips``.
    """
    chosen: Any = getattr(pair.target.config.get_text_config(), "num_experts_per_tok", None)
    found = {}
    for path, module in pair.named_modules() if chosen else ():
        count: Any = getattr(module, "num_experts", None)
        if count and any(weight.ndim == 3 for _, weight in module.named_parameters(recurse=False)):
            own = (name for name in weights if name.startswith(path + "."))
            found |= {
                name: (count, chosen) for name in own if weights[name].shape[0] in (count, count / chips)
            }
    return found


def cached_values(target: Any, context: int, rows: int) -> int:
    """Values of K and V that ``rows`` queries of one sequence read, in all layers."""
    return sum(spec.width * _seen(context, spec.window, rows) for spec in target.specs)


def _seen(context: int, window: int | None, rows: int) -> int:
    """Context positions that any of ``rows`` queries sees."""
    return context if window is None else min(context, window + rows - 1)


def _attention_flops(plan: DecodePlan, target: Any, context: int) -> int:
    """FLOPs of scores and weighted values of the M rows: two per product."""
    heads = target.config.get_text_config().num_attention_heads
    widths = sum(
        (spec.k_dim + spec.v_dim) * _seen(context, spec.window, plan.verify_width) for spec in target.specs
    )
    return 2 * plan.batch_size * plan.verify_width * heads * widths
