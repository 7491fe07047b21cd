"""Greedy DFlash decoding of ragged batches: prefill and round are pure functions of a state.

A round drafts a block in one pass, scores the block with the target in one pass, and keeps the longest prefix
of the target's own tokens, plus the target's next token (arXiv 2602.06036).
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Int

from jax_bridge.reference.attention import Params
from jax_bridge.reference.config import DrafterConfig, TargetConfig
from jax_bridge.reference.dflash2 import choose
from jax_bridge.reference.drafter import logits, noise_embeddings, project
from jax_bridge.reference.static import Layer, empty_layer, extend, put_rows, static_forward
from jax_bridge.reference.target import EMBEDDING, Cache, empty_cache, forward_target, head_weight


class Models(NamedTuple):
    """The two configs: hashable, so `jax.jit` takes them as a static argument."""

    target: TargetConfig
    drafter: DrafterConfig


class PairParams(NamedTuple):
    """The two parameter mappings by checkpoint name."""

    target: Params
    drafter: Params


class State(NamedTuple):
    """A batch in mid-generation. B rows, S slots, W rows of a block, E stop ids."""

    tokens: Any  # int32 [B, S], column = position; the anchor is at column `length`
    length: Any  # int32 [B], tokens whose target keys and values are in the cache
    limit: Any  # int32 [B], most tokens of a row, prompt included
    stop_ids: Any  # int32 [B, E], padded with -1
    done: Any  # bool [B]
    target: Cache
    drafter: tuple[Layer, ...]
    context: Any  # [B, W, H], projected features of the last round, not yet in the drafter's cache
    buffered: Any  # int32 [B], rows of `context` that were committed
    accepted: Any  # uint8 [B, S], tokens each round committed, cut at a stop id but not at the limit
    rounds: Any  # int32 [B]


class Drafted(NamedTuple):
    """``hidden`` [B, W, H] of the block, ``tokens`` int32 [B, W - 1] after the anchor, the new ``cache``."""

    hidden: jax.Array
    tokens: jax.Array
    cache: tuple[Layer, ...]


def empty_state(
    models: Models, dtype: DTypeLike, batch: int, slots: int, stop_slots: int = 8, cache: Cache | None = None
) -> State:
    """A state without prompts: all zeros, every row live. ``slots`` S must exceed a row's limit by W.

    ``cache`` is the target's empty cache; None: a static cache.
    """
    zeros = jnp.zeros(batch, jnp.int32)
    drafter = models.drafter
    layer = partial(empty_layer, batch, drafter.num_key_value_heads, slots, drafter.head_dim, dtype)
    return State(
        tokens=jnp.zeros((batch, slots), jnp.int32),
        length=zeros,
        limit=zeros,
        stop_ids=jnp.full((batch, stop_slots), -1, jnp.int32),
        done=jnp.zeros(batch, bool),
        target=empty_cache(models.target, batch, slots, dtype) if cache is None else cache,
        drafter=tuple(layer() for _ in drafter.masks),
        context=jnp.zeros((batch, drafter.block_size, drafter.hidden_size), dtype),
        buffered=zeros,
        accepted=jnp.zeros((batch, slots), jnp.uint8),
        rounds=zeros,
    )


def prefill(
    models: Models, weights: PairParams, state: State, ids: Int[Array, "B T"], count: Int[Array, " B"]
) -> State:
    """Whole prompts into an empty state: ``ids`` padded on the right, ``count[b]`` of them real."""
    target, drafter = models
    out = forward_target(
        weights.target, target, ids, state.length, state.target, drafter.target_layer_ids, row=count - 1
    )
    anchor = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    tokens = put_rows(state.tokens, ids, state.length, axis=1)
    context = project(weights.drafter, drafter, out.features.astype(state.context.dtype))
    stopped = (anchor == state.stop_ids).any(axis=1)
    return state._replace(
        tokens=put_rows(tokens, anchor, count, axis=1),
        length=count,
        done=stopped | (count + 1 >= state.limit),
        target=out.cache,
        drafter=extend(weights.drafter, drafter, context, state.drafter, state.length),
    )


def draft_block(models: Models, weights: PairParams, state: State) -> Drafted:
    """The drafter's pass of the next round, and its best token for each masked row."""
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)[:, 0]
    noise = noise_embeddings(models.drafter, weights.target[EMBEDDING], anchor)
    hidden, cache = static_forward(
        weights.drafter,
        models.drafter,
        noise.astype(state.context.dtype),
        state.context,
        state.drafter,
        state.length - state.buffered,
        state.length,
    )
    head = head_weight(weights.target, models.target)
    scores = logits(models.drafter, hidden[:, 1:].astype(head.dtype), head)
    tokens = choose(weights.drafter, models.drafter, hidden[:, 1:], scores, anchor)
    return Drafted(hidden, tokens, cache)


def decode_round(models: Models, weights: PairParams, state: State) -> State:
    """One round: every row that is not done commits 1 to W tokens."""
    target, drafter = models
    drafted = draft_block(models, weights, state)
    anchor = jnp.take_along_axis(state.tokens, state.length[:, None], axis=1)
    block = jnp.concatenate([anchor, drafted.tokens], axis=1)
    out = forward_target(weights.target, target, block, state.length, state.target, drafter.target_layer_ids)
    picks = jnp.argmax(out.logits, axis=-1).astype(jnp.int32)
    # Row i's pick is the token after it; the first pick that the block does not hold ends the prefix.
    wrong = jnp.pad(picks[:, :-1] != block[:, 1:], ((0, 0), (0, 1)), constant_values=True)
    kept = jnp.argmax(wrong, axis=1).astype(jnp.int32) + 1
    at = jnp.arange(block.shape[1], dtype=jnp.int32)
    stops = (picks[:, :, None] == state.stop_ids[:, None]).any(axis=2) & (at < kept[:, None])
    stopped = stops.any(axis=1)
    kept = jnp.where(stopped, jnp.argmax(stops, axis=1).astype(jnp.int32) + 1, kept)
    remaining = state.limit - state.length - 1
    committed = jnp.where(state.done, 0, jnp.minimum(kept, remaining))
    return state._replace(
        tokens=put_rows(state.tokens, picks, state.length + 1, axis=1),
        length=state.length + committed,
        done=state.done | (stopped & (kept <= remaining)) | (kept >= remaining),
        target=out.cache,
        drafter=drafted.cache,
        context=project(weights.drafter, drafter, out.features.astype(state.context.dtype)),
        buffered=committed,
        accepted=put_rows(state.accepted, kept[:, None], state.rounds, axis=1),
        rounds=state.rounds + ~state.done,
    )


def start(
    models: Models,
    weights: PairParams,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: tuple[int, ...] = (),
    cache: Cache | None = None,
) -> State:
    """The state after ``prompts``, of any lengths.

    Args:
        models: the configs.
        weights: the parameters.
        prompts: token ids of each row.
        max_new_tokens: most new tokens of a row.
        stop_ids: ids after which a row ends.
        cache: the target's empty cache, such as from `empty_pages`; consumed. None: a static cache.
    """
    lengths = [len(prompt) for prompt in prompts]
    slots = max(lengths) + max_new_tokens + models.drafter.block_size
    ids = np.zeros((len(prompts), max(lengths)), np.int32)
    for row, prompt in enumerate(prompts):
        ids[row, : len(prompt)] = prompt
    count = jnp.array(lengths, jnp.int32)
    dtype = weights.drafter["fc.weight"].dtype
    state = empty_state(models, dtype, len(prompts), slots, len(stop_ids), cache)
    stops = jnp.tile(jnp.array(stop_ids, jnp.int32), (len(prompts), 1))
    state = state._replace(limit=count + max_new_tokens, stop_ids=stops)
    return jax.jit(prefill, static_argnums=0)(models, weights, state, jnp.asarray(ids), count)


def decode(
    models: Models,
    weights: PairParams,
    prompts: list[list[int]],
    max_new_tokens: int,
    stop_ids: tuple[int, ...] = (),
    cache: Cache | None = None,
) -> tuple[list[list[int]], list[list[int]]]:
    """New tokens of each row, and the counts that its rounds committed (as ``State.accepted``).

    Arguments are those of ``start``.
    """
    state = start(models, weights, prompts, max_new_tokens, stop_ids, cache)
    step = jax.jit(decode_round, static_argnums=0, donate_argnums=2)
    while not state.done.all():
        state = step(models, weights, state)
    tokens, length, accepted, rounds = map(
        np.asarray, (state.tokens, state.length, state.accepted, state.rounds)
    )
    rows = range(len(prompts))
    texts = [tokens[row, len(prompts[row]) : length[row] + 1].tolist() for row in rows]
    return texts, [accepted[row, : rounds[row]].tolist() for row in rows]
