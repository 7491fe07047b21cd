"""Static cache arrays: every position has its slot from the start, and rows are written in place.

A row's slots at or past its length are stale. They stay behind every mask until they are
overwritten, so rejected drafts need no clean-up.
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
    rms_norm,
    swiglu,
    visible,
)
from jax_bridge.reference.config import DrafterConfig
from jax_bridge.reference.dflash2 import convolved
from jax_bridge.reference.rope import rotary_tables


class Layer(NamedTuple):
    """One layer's keys and values, [B, G, S, D] each: slot = absolute position."""

    key: Float[Array, "B G S D"]
    value: Float[Array, "B G S D"]

    @property
    def batch(self) -> int:
        """Rows B."""
        return self.key.shape[0]

    @property
    def slots(self) -> int:
        """Positions S of a row."""
        return self.key.shape[2]

    def written(self, rows: Rows, start: Int[Array, " B"]) -> tuple["Layer", Rows]:
        """The layer with K and V [B, G, R, D] at ``start[b]``, and all it then holds: [B, G, S, D]."""
        layer = write_layer(self, rows, start)
        return layer, (layer.key, layer.value)


def empty_layer(batch: int, heads: int, slots: int, dim: int, dtype: DTypeLike) -> Layer:
    """Zeros: a slot behind the mask has weight 0, and 0 times what was never written must be 0."""
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


# The network is that of `jax_bridge.reference.drafter`. What differs is where keys and values lie:
# context rows of the last round are projected together with the block, so their weights are read once.
Cache = tuple[Layer, ...]


def draft_pass(
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
        context: projected features of the tokens from position ``held[b]`` on. Those before
            ``length[b]`` are committed; the rest is written too, and stale.
        cache: context keys and values of positions below ``held[b]``.
        held: context rows in the cache.
        length: committed context rows, ``held`` and those of ``context`` together.
    """
    rows, width = context.shape[1], noise.shape[1]
    block_at = positions(length, width)
    cos, sin = rotary_tables(
        config.rope, jnp.concatenate([positions(held, rows), block_at], axis=1), noise.dtype
    )
    slots = jnp.arange(cache[0].key.shape[2], dtype=length.dtype)[None]
    committed = (slots < length[:, None])[:, None]
    hidden, written = noise, []
    for index, (layer, mask) in enumerate(zip(cache, config.masks, strict=True)):
        name = f"layers.{index}"
        block = rms_norm(params, f"{name}.input_layernorm", hidden, config.rms_norm_eps)
        block, after = convolved(params, config, f"{name}.attention_conv", block)
        queries = project_queries(
            params, f"{name}.self_attn", config, block, (cos[:, :, rows:], sin[:, :, rows:])
        )
        keys, values = project_keys_values(
            params, f"{name}.self_attn", config, jnp.concatenate([context, block], axis=1), (cos, sin)
        )
        layer = write_layer(layer, (keys[:, :, :rows], values[:, :, :rows]), held)
        past = Seen(layer.key, layer.value, committed & visible(mask, block_at, slots))
        own = Seen(keys[:, :, rows:], values[:, :, rows:], visible(mask, block_at, block_at))
        mixed = linear(params, f"{name}.self_attn.o_proj", attend(queries, [past, own]))
        hidden = hidden + after(mixed)
        inner = rms_norm(params, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps)
        inner, after = convolved(params, config, f"{name}.mlp_conv", inner)
        hidden = hidden + after(swiglu(params, f"{name}.mlp", inner))
        written.append(layer)
    return rms_norm(params, "norm", hidden, config.rms_norm_eps), tuple(written)


def extend(
    params: Params,
    config: DrafterConfig,
    context: Float[Array, "B R H"],
    cache: Cache,
    start: Int[Array, " B"],
) -> Cache:
    """The cache with projected ``context`` rows at positions ``start[b] ..``: a prompt's, say."""
    tables = rotary_tables(config.rope, positions(start, context.shape[1]), context.dtype)
    return tuple(
        write_layer(
            layer,
            project_keys_values(params, f"layers.{index}.self_attn", config, context, tables),
            start,
        )
        for index, layer in enumerate(cache)
    )
