"""Llama and Qwen3 decoders as one pure function of (params, config, arrays), on a static or a paged cache.

Source: the published checkpoints; tensors keep their names.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jax.typing import DTypeLike
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
from jax_bridge.reference.config import LayerMask, TargetConfig
from jax_bridge.reference.rope import rotary_tables
from jax_bridge.reference.static import Layer, empty_layer, positions

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"

Cache = tuple[Any, ...]
"""The layers' caches, all static (`Layer`) or all paged (`PagedLayer`)."""


class TargetOutput(NamedTuple):
    """``logits`` [B, M or 1, V]; ``features`` [B, M, n*H], tapped layers joined; the written ``cache``."""

    logits: jax.Array
    features: jax.Array
    cache: Cache


def empty_cache(config: TargetConfig, batch: int, slots: int, dtype: DTypeLike) -> tuple[Layer, ...]:
    """A zeroed `Layer` [B, G, S, D] per decoder layer."""
    heads, dim = config.num_key_value_heads, config.head_dim
    return tuple(empty_layer(batch, heads, slots, dim, dtype) for _ in range(config.num_hidden_layers))


def head_weight(params: Params, config: TargetConfig) -> Float[Array, "V H"]:
    """The weight of the output head: the embedding's if the two are tied."""
    return params[EMBEDDING if config.tie_word_embeddings else HEAD]


def forward_target(
    params: Params,
    config: TargetConfig,
    ids: Int[Array, "B M"],
    start: Int[Array, " B"],
    cache: Cache,
    taps: tuple[int, ...],
    row: Int[Array, " B"] | None = None,
) -> TargetOutput:
    """A pass over M rows per sequence at positions ``start[b] .. start[b] + M - 1``, causal over the cache.

    Args:
        params: tensors by checkpoint name, from ``load_target``.
        config: from ``load_target``.
        ids: tokens in [0, V).
        start: tokens of each sequence already in ``cache``; ``start + M`` must not exceed its slots.
        cache: from ``empty_cache``, ``empty_pages`` or an earlier call; its layers decide the kind.
        taps: 0-based layers whose outputs, before the final norm, are the features, n of them.
        row: the one row per sequence whose logits are computed; None: all rows.
    """
    at = positions(start, ids.shape[1])
    slots = jnp.arange(cache[0].slots, dtype=at.dtype)[None]
    seen = visible(LayerMask(causal=True), at, slots)
    hidden = params[EMBEDDING][ids]
    tables = rotary_tables(config.rope, at, hidden.dtype)
    written, outputs = [], []
    for index, layer in enumerate(cache):
        name = f"model.layers.{index}"
        rows = rms_norm(params, f"{name}.input_layernorm", hidden, config.rms_norm_eps)
        queries = project_queries(params, f"{name}.self_attn", config, rows, tables)
        fresh = project_keys_values(params, f"{name}.self_attn", config, rows, tables)
        layer, (keys, values) = layer.written(fresh, start)
        mixed = attend(queries, [Seen(keys, values, seen)])
        hidden = hidden + linear(params, f"{name}.self_attn.o_proj", mixed)
        rows = rms_norm(params, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps)
        hidden = hidden + swiglu(params, f"{name}.mlp", rows)
        written.append(layer)
        outputs.append(hidden)
    features = jnp.concatenate([outputs[tap] for tap in taps], axis=-1)
    if row is not None:
        hidden = jnp.take_along_axis(hidden, row[:, None, None], axis=1)
    hidden = rms_norm(params, "model.norm", hidden, config.rms_norm_eps)
    weight = head_weight(params, config)
    logits = jnp.einsum("bmh,vh->bmv", hidden, weight, precision=Precision.HIGHEST)
    return TargetOutput(logits, features, tuple(written))
