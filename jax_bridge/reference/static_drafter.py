"""The drafter's pass of a round on static cache arrays, and the context rows of a prompt.

The network is that of `jax_bridge.reference.drafter`. What differs is where keys and values lie:
context rows of the last round are projected together with the block, so their weights are read once.
"""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_bridge.reference.attention import (
    Params,
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
from jax_bridge.reference.rope import rotary_tables
from jax_bridge.reference.second import convolved
from jax_bridge.reference.static import Layer, positions, write_layer

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
