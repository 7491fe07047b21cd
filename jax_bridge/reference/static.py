"""Static cache arrays: every position has its slot from the start, and rows are written in place.

A row's slots at or past its length are stale. Masks hide them until they are overwritten, so rejected drafts
need no clean-up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jax_bridge.reference.attention import (
    Params,
    Rows,
    Seen,
    attend,
    linear,
    project_keys_values,
    project_queries,
    visible,
)
from jax_bridge.reference.config import DrafterConfig
from jax_bridge.reference.drafter import run_layers
from jax_bridge.reference.rope import rotary_tables


class Layer(NamedTuple):
    """Keys and values of one layer, [B, G, S, D] each: a slot is an absolute position."""

    key: Float[Array, "B G S D"]
    value: Float[Array, "B G S D"]

    @property
    def slots(self) -> int:
        """Positions S of a row."""
        return self.key.shape[2]

    def written(self, rows: Rows, start: Int[Array, " B"]) -> tuple["Layer", Rows]:
        """The layer with K and V [B, G, R, D] at ``start[b]``, and the K and V [B, G, S, D] of all slots."""
        layer = write_layer(self, rows, start)
        return layer, (layer.key, layer.value)


def empty_layer(batch: int, heads: int, slots: int, dim: int, dtype: DTypeLike) -> Layer:
    """Zeros: a hidden slot has weight 0, and 0 times its value must be 0."""
    shape = (batch, heads, slots, dim)
    return Layer(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write_layer(layer: Layer, rows: Rows, start: Int[Array, " B"]) -> Layer:
    """Put keys and values [B, G, R, D] at ``start[b]``."""
    return Layer(put_rows(layer.key, rows[0], start, axis=2), put_rows(layer.value, rows[1], start, axis=2))


def put_rows(
    buffer: Shaped[Array, "B *slots"], rows: Shaped[Array, "B *rows"], start: Int[Array, " B"], axis: int
) -> Shaped[Array, "B *slots"]:
    """``buffer`` with row b of ``rows`` at ``start[b]`` along ``axis``.

    ``start[b] + rows.shape[axis]`` must lie within the buffer: XLA moves a window that does not.
    """
    for row in range(buffer.shape[0]):
        at: list = [0] * buffer.ndim
        at[0], at[axis] = row, start[row]
        buffer = jax.lax.dynamic_update_slice(buffer, rows[row : row + 1].astype(buffer.dtype), at)
    return buffer


def positions(start: Int[Array, " B"], count: int) -> Int[Array, "B count"]:
    """Absolute positions of ``count`` rows from ``start[b]`` on."""
    return start[:, None] + jnp.arange(count, dtype=start.dtype)


# The network of `jax_bridge.reference.drafter` on static arrays. One product projects the context rows of the
# last round and the block, so weights are read once.
Cache = tuple[Layer, ...]


def static_forward(
    params: Params,
    config: DrafterConfig,
    noise: Float[Array, "B W H"],
    context: Float[Array, "B M H"],
    cache: Cache,
    held: Int[Array, " B"],
    length: Int[Array, " B"],
) -> tuple[Float[Array, "B W H"], Cache]:
    """Hidden states of the block at positions ``length[b] ..``, and the cache with the new context.

    Args:
        params: tensors by checkpoint name.
        config: of the drafter.
        noise: embeddings of [anchor, MASK, ...], scaled.
        context: projected features of the tokens from position ``held[b]`` on. Rows at or past ``length[b]``
            are stale; they are written, and hidden.
        cache: context keys and values of positions below ``held[b]``.
        held: context rows in the cache.
        length: committed context rows: ``held``, and the committed rows of ``context``.
    """
    rows, width = context.shape[1], noise.shape[1]
    block_at = positions(length, width)
    cos, sin = rotary_tables(
        config.rope, jnp.concatenate([positions(held, rows), block_at], axis=1), noise.dtype
    )
    slots = jnp.arange(cache[0].slots, dtype=length.dtype)[None]
    committed = (slots < length[:, None])[:, None]

    def attend_layer(index: int, name: str, block: Array) -> tuple[Array, Layer]:
        mask = config.masks[index]
        queries = project_queries(params, name, config, block, (cos[:, :, rows:], sin[:, :, rows:]))
        joined = jnp.concatenate([context, block], axis=1)
        keys, values = project_keys_values(params, name, config, joined, (cos, sin))
        layer = write_layer(cache[index], (keys[:, :, :rows], values[:, :, :rows]), held)
        past = Seen(layer.key, layer.value, committed & visible(mask, block_at, slots))
        own = Seen(keys[:, :, rows:], values[:, :, rows:], visible(mask, block_at, block_at))
        return linear(params, f"{name}.o_proj", attend(queries, [past, own])), layer

    hidden, written = run_layers(params, config, noise, attend_layer)
    return hidden, tuple(written)


def extend(
    params: Params,
    config: DrafterConfig,
    context: Float[Array, "B R H"],
    cache: Cache,
    start: Int[Array, " B"],
) -> Cache:
    """The cache with projected ``context`` rows at positions ``start[b] ..``, such as those of a prompt."""
    tables = rotary_tables(config.rope, positions(start, context.shape[1]), context.dtype)
    return tuple(
        write_layer(
            layer, project_keys_values(params, f"layers.{index}.self_attn", config, context, tables), start
        )
        for index, layer in enumerate(cache)
    )
