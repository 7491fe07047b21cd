"""Attention in plain jnp whose cost follows the context: keys come a block at a time, in a loop.

Every platform without its own kernel runs this. The loop ends at the longest row's last key, so a long buffer
costs no more than a short one, and only one block's scores exist at a time.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from jax_bridge.kernels.online_softmax import LOWEST
from jax_bridge.kernels.row_reductions import row_sum
from jax_bridge.weights.padding import enlarged, enough_rows, whole_tiles

MOST_KEYS, FEWEST_KEYS = 256, 64
"""Keys of a block: few, so that its copies stay in a CPU's caches; more where a key has little work."""
BLOCK_BYTES = 6 << 20
FEW_ROWS = 64
TALL = 51
"""Rows from which XLA's CPU compiler sums a float32 product in another order, unless its results' rows have
whole `LANES`, and at most `MOST_LANES`."""
LANES, MOST_LANES = 64, 512
FLOOR = LOWEST / 10
"""Lower bound of each row's largest score: a hidden key then has weight zero in every row."""
IN_FLOAT32: Any = {"preferred_element_type": jnp.float32}


class Block(NamedTuple):
    """Keys and values of one block, and the mask of the keys that each row sees."""

    key: Float[Array, "B G keys D"]
    value: Float[Array, "B G keys Dv"]
    seen: Bool[Array, "B M keys"]


class SoftmaxState(NamedTuple):
    """Per query row: the largest score, the weights' sum, and the weighted values, all in float32."""

    top: Float[Array, "B G heads M"]
    total: Float[Array, "B G heads M"]
    sums: Float[Array, "B G heads M Dv"]

    @classmethod
    def begin(cls, query: Array, v_dim: int, sinks: Array | None = None) -> SoftmaxState:
        """The state without keys, or with ``sinks`` [G, heads]: they enter the softmax without a value."""
        shape = query.shape[:-1]
        top = jnp.full(shape, FLOOR, jnp.float32)
        if sinks is not None:
            top = jnp.maximum(top, sinks[None, :, :, None].astype(jnp.float32))
        total = jnp.where(top > FLOOR, 1.0, 0.0)
        return cls(top, total, jnp.zeros((*shape, v_dim), jnp.float32))

    def add(self, query: Array, block: Block, scale: float, softcap: float | None = None) -> SoftmaxState:
        """The state after a block for ``query`` [B, G, heads, M, D]."""
        score = _scores(query, block.key) * scale
        if softcap is not None:
            score = jnp.tanh(score / softcap) * softcap
        score = jnp.where(block.seen[:, None, None], score, LOWEST)
        peak = jnp.maximum(self.top, score.max(axis=-1))
        weight = jnp.exp(score - peak[..., None])
        fade = jnp.exp(self.top - peak)
        added = _gains(weight.astype(block.value.dtype), block.value)
        return SoftmaxState(
            peak, self.total * fade + row_sum(weight)[..., 0], self.sums * fade[..., None] + added
        )

    def result(self) -> Float[Array, "B G heads M Dv"]:
        """The attention's output."""
        return self.sums / self.total[..., None]


def _scores(query: Array, key: Array) -> Float[Array, "B G heads M keys"]:
    """Rows go first, however few: as second operand the order of their sums depends on their number."""
    size = whole_tiles(query.dtype, query.shape[-1])
    query, key = (enlarged(each, -1, size) for each in (query, key))
    return _flat_product(lambda rows: jnp.einsum("bgrd,bgkd->bgrk", rows, key, **IN_FLOAT32), query)


def _gains(weight: Array, value: Array) -> Float[Array, "B G heads M Dv"]:
    size = whole_tiles(weight.dtype, weight.shape[-1])
    weight, value = enlarged(weight, -1, size), enlarged(value, -2, size)
    cut = value.dtype == jnp.float32 and (value.shape[-1] % LANES > 0 or value.shape[-1] > MOST_LANES)
    return _flat_product(lambda rows: jnp.einsum("bgrk,bgkd->bgrd", rows, value, **IN_FLOAT32), weight, cut)


def _flat_product(product: Callable[[Array], Array], rows: Array, cut: bool = False) -> Array:
    """``rows`` [B, G, heads, M, X] in one product per K/V head, padded to `enough_rows`.

    ``cut``: in several of fewer than `TALL` rows, where a block has as many and a plain step has not.
    """
    batch, groups, heads, count, width = rows.shape
    flat = rows.reshape(batch, groups, -1, width)
    if cut and heads < TALL <= flat.shape[2] and count < FEW_ROWS:
        size = flat.shape[2] // -(-flat.shape[2] // (TALL // 2))
        pieces = -(-flat.shape[2] // size)
        whole = enlarged(flat, 2, pieces * size).reshape(batch, groups, pieces, size, width)
        out = jax.lax.map(product, jnp.moveaxis(whole, 2, 0))
        out = jnp.moveaxis(out, 0, 2).reshape(batch, groups, pieces * size, -1)
    else:
        out = product(enlarged(flat, 2, enough_rows(rows.dtype, flat.shape[2])))
    return out[:, :, : flat.shape[2]].reshape(*rows.shape[:-1], -1)


def fitting_keys(query: Float[Array, "B G heads M D"], v_dim: int) -> int:
    """Keys of a block for ``query``; a power of two, equal for every count of few rows."""
    batch, groups, heads, rows, dim = query.shape
    each = 4 * batch * groups * (heads * rows + dim + v_dim)  # bytes: its scores, itself and its value
    keys = FEWEST_KEYS
    while rows >= FEW_ROWS and keys < MOST_KEYS and 2 * keys * each <= BLOCK_BYTES:
        keys *= 2
    return keys


def stream(
    running: SoftmaxState,
    query: Float[Array, "B G heads M D"],
    read: Callable[[Any], Block],
    first: Int[Array, ""] | int,
    end: Int[Array, ""],
    scale: float,
    softcap: float | None = None,
) -> SoftmaxState:
    """``running`` after the blocks ``first`` to ``end - 1``; ``read`` returns a block by its number."""

    def add(block: Any, running: SoftmaxState) -> SoftmaxState:
        return running.add(query, read(block), scale, softcap)

    return jax.lax.fori_loop(first, end, add, running)


def dense_block(key: Array, value: Array, number: Any, keys: int) -> tuple[Array, Array, Array, Array]:
    """Block ``number`` of ``keys`` slots of buffers [B, G, S, D]: (key, value, slots, mask of new slots).

    The last block begins earlier where it would pass the end; slots of the block before are not new.
    """
    at = jnp.minimum(number * keys, key.shape[2] - keys)
    slot = at + jnp.arange(keys, dtype=jnp.int32)
    key, value = (jax.lax.dynamic_slice_in_dim(buffer, at, keys, axis=2) for buffer in (key, value))
    return key, value, slot, slot >= number * keys


def _begin(inputs: Any, key: Array, value: Array) -> tuple[Array, int, SoftmaxState]:
    """(Query by K/V head [B, G, heads, M, D], keys of a block, a softmax with only the sinks)."""
    batch, heads, rows, dim = inputs.query.shape
    groups, slots = key.shape[1:3]
    grouped = inputs.query.reshape(batch, groups, heads // groups, rows, dim)
    sinks = None if inputs.sinks is None else inputs.sinks.reshape(groups, -1)
    keys = min(fitting_keys(grouped, value.shape[3]), slots)
    return grouped, keys, SoftmaxState.begin(grouped, value.shape[3], sinks)


def stream_dense(inputs: Any, key: Array, value: Array) -> Float[Array, "B M Q Dv"]:
    """`torch_dflash.ops.attention` of arrays: causal, to buffers that hold the rows too."""
    query, start, window = inputs.query, inputs.start, inputs.window
    rows, slots = query.shape[2], key.shape[2]
    grouped, keys, running = _begin(inputs, key, value)
    at = (start[:, None] + jnp.arange(rows, dtype=start.dtype))[:, :, None]

    def read(number: Any) -> Block:
        *held, slot, new = dense_block(key, value, number, keys)
        seen = new & (slot <= at)
        return Block(held[0], held[1], seen if window is None else seen & (slot > at - window))

    first = 0 if window is None else jnp.maximum(jnp.min(start) - window + 1, 0) // keys
    end = jnp.minimum(jnp.max(start) + rows, slots)
    running = stream(running, grouped, read, first, -(-end // keys), inputs.scale, inputs.softcap)
    return _rows_first(running, query)


def stream_past(inputs: Any, past: Any, causal: bool) -> Float[Array, "B M Q Dv"]:
    """`torch_dflash.ops.block_attention` of arrays: the block itself, then the context's slots in use."""
    if inputs.tree is not None:
        return _stream_tree(inputs, past.key, past.value)
    query, start, window = inputs.query, inputs.start, inputs.window
    batch, rows, slots = query.shape[0], query.shape[2], past.key.shape[2]
    grouped, keys, running = _begin(inputs, past.key, past.value)
    row = jnp.arange(rows, dtype=start.dtype)
    inside = seen_inside(row[None], window, causal, None)
    at = (start[:, None] + row)[:, :, None]

    def read(number: Any) -> Block:
        *held, slot, new = dense_block(past.key, past.value, number, keys)
        position = jnp.take(past.position, slot, axis=1)[:, None]
        seen = new & (position >= 0)
        return Block(held[0], held[1], seen if window is None else seen & (at - position < window))

    own = Block(inputs.key, inputs.value, jnp.broadcast_to(inside, (batch, rows, rows)))
    running = running.add(grouped, own, inputs.scale, inputs.softcap)
    used = jnp.max(jnp.where(past.position >= 0, jnp.arange(1, slots + 1, dtype=jnp.int32), 0))
    return _rows_first(
        stream(running, grouped, read, 0, -(-used // keys), inputs.scale, inputs.softcap), query
    )


def _stream_tree(inputs: Any, key: Array, value: Array) -> Float[Array, "B M Q Dv"]:
    """A tree's rows, to buffers without them; slot p is the position p."""
    query, start, window = inputs.query, inputs.start, inputs.window
    batch, rows = query.shape[0], query.shape[2]
    grouped, keys, running = _begin(inputs, key, value)
    at = (start[:, None] + inputs.tree.depth)[:, :, None]

    def read(number: Any) -> Block:
        # Rows may reach behind the last slot: all blocks have full length, and the last is shifted.
        slot = number * keys + jnp.arange(keys, dtype=start.dtype)
        *held, there, _ = dense_block(key, value, number, keys)
        held = [jnp.take(each, jnp.minimum(slot - there[0], keys - 1), axis=2) for each in held]
        seen = slot < start[:, None, None]
        seen = seen if window is None else seen & (slot > at - window)
        return with_rows(Block(held[0], held[1], jnp.broadcast_to(seen, (batch, rows, keys))), slot, inputs)

    first = 0 if window is None else jnp.maximum(jnp.min(start) - window + 1, 0) // keys
    end = -(-(jnp.max(start) + rows) // keys)
    return _rows_first(stream(running, grouped, read, first, end, inputs.scale, inputs.softcap), query)


def with_rows(held: Block, slot: Int[Array, " keys"], inputs: Any) -> Block:
    """A block of slots with a tree's rows in the slots from ``inputs.start`` on, where a chain's are.

    Sums then have plain decoding's order, and half precision rounds equally: exactly for the tree's first
    branch, nearly for others, whose rows come after their siblings.
    """
    row = slot - inputs.start[:, None]
    own = (row >= 0) & (row < inputs.key.shape[2])
    row = jnp.clip(row, 0, inputs.key.shape[2] - 1)
    inside = seen_inside(inputs.tree.depth, inputs.window, True, inputs.tree)

    def put(kept: Array, fresh: Array, at: Array, mine: Array, axis: int) -> Array:
        return jnp.where(mine, jnp.take_along_axis(fresh.astype(kept.dtype), at, axis), kept)

    rows, mine = row[:, None, :, None], own[:, None, :, None]
    return Block(
        put(held.key, inputs.key, rows, mine, 2),
        put(held.value, inputs.value, rows, mine, 2),
        put(held.seen, inside, row[:, None], own[:, None], 2),
    )


def seen_inside(depth: Array, window: int | None, causal: bool, tree: Any) -> Bool[Array, "B M M"]:
    """The mask between rows of a block by their distance from the first row; in a tree also by ancestry."""
    gap = depth[:, :, None] - depth[:, None]
    inside = gap >= 0 if causal else gap == gap
    inside = inside if window is None else inside & (jnp.abs(gap) < window)
    if tree is None:
        return inside
    row = jnp.arange(tree.end.shape[1], dtype=tree.end.dtype)
    return inside & (row <= row[:, None]) & (row[:, None] < tree.end[:, None])


def _rows_first(running: SoftmaxState, query: Array) -> Float[Array, "B M Q Dv"]:
    batch, heads, rows, _ = query.shape
    return running.result().reshape(batch, heads, rows, -1).swapaxes(1, 2).astype(query.dtype)
