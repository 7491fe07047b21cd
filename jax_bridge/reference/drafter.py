"""The DFlash drafter as pure functions of (params, config, arrays): arXiv 2602.06036.

Queries come from the block only. Keys and values come from the context feature and the block, through the
same projections. All layers share the context feature, which skips their input norms, output projections and
MLPs.
"""

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Float, Int

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

Cache = list[Rows]


def forward(
    params: Params,
    config: DrafterConfig,
    noise_embeds: Float[Array, "B W H"],
    context_hidden_states: Float[Array, "B R nH"],
    position_ids: Int[Array, "B S"],
    cache: Cache | None = None,
) -> tuple[Float[Array, "B W H"], Cache]:
    """One pass of the drafter: hidden states of the block, from new context rows and the cache.

    Args:
        params: tensors by checkpoint name, from ``load_drafter``.
        config: from ``load_drafter``.
        noise_embeds: embeddings of [anchor, MASK, ...], in the parameters' dtype.
        context_hidden_states: outputs of the tapped target layers for the context rows committed
            since the last call, concatenated on the last axis (n*H); n_rows may be 0.
        position_ids: [B, n_rows + W] absolute positions: first of the new context rows, then of the block.
            They must continue those of the cache: windows count rows, not positions.
        cache: the second result of the previous call; None for an empty context.

    Returns:
        Hidden states after the final norm, in the parameters' dtype, and a new cache: per layer
        K and V [B, G, S, D] of all context rows so far, K normed and rotated. Block rows are
        never kept. The cache passed in is unchanged.
    """
    context = project(params, config, context_hidden_states)
    new = context.shape[1]
    cos, sin = rotary_tables(config.rope, position_ids, noise_embeds.dtype)

    def attend_layer(index: int, name: str, block: Array) -> tuple[Array, Rows]:
        """Block rows see the whole context and the block; the cache grows by the new context rows."""
        queries = project_queries(params, name, config, block, (cos[:, :, new:], sin[:, :, new:]))
        rows = jnp.concatenate([context, block], axis=1)
        keys, values = project_keys_values(params, name, config, rows, (cos, sin))
        if cache is not None:
            keys, values = (
                jnp.concatenate(pair, axis=2) for pair in zip(cache[index], (keys, values), strict=True)
            )
        committed = keys.shape[2] - block.shape[1]
        at = jnp.arange(keys.shape[2])[None]
        seen = visible(config.masks[index], at[:, committed:], at)
        mixed = attend(queries, [Seen(keys, values, seen)])
        kept = keys[:, :, :committed], values[:, :, :committed]
        return linear(params, f"{name}.o_proj", mixed), kept

    return run_layers(params, config, noise_embeds, attend_layer)


def run_layers(
    params: Params, config: DrafterConfig, hidden: Array, attend_layer: Callable[[int, str, Array], Any]
) -> tuple[Float[Array, "B W H"], list]:
    """All layers and the final norm: the block's hidden states, and each layer's new cache.

    ``attend_layer(index, name of the tensors, normed block)`` returns the attention's output and the cache.
    """
    kept = []
    for index in range(config.num_hidden_layers):
        name = f"layers.{index}"
        block = rms_norm(params, f"{name}.input_layernorm", hidden, config.rms_norm_eps)
        block, after = convolved(params, config, f"{name}.attention_conv", block)
        mixed, rows = attend_layer(index, f"{name}.self_attn", block)
        kept.append(rows)
        hidden = hidden + after(mixed)
        inner = rms_norm(params, f"{name}.post_attention_layernorm", hidden, config.rms_norm_eps)
        inner, after = convolved(params, config, f"{name}.mlp_conv", inner)
        hidden = hidden + after(swiglu(params, f"{name}.mlp", inner))
    return rms_norm(params, "norm", hidden, config.rms_norm_eps), kept


def project(params: Params, config: DrafterConfig, features: Float[Array, "B R nH"]) -> Float[Array, "B R H"]:
    """Context rows of target features: mixed once for all layers, then normed."""
    return rms_norm(params, "hidden_norm", linear(params, "fc", features), config.rms_norm_eps)


def noise_embeddings(
    config: DrafterConfig,
    embed_weight: Float[Array, "V H"],
    anchor: Int[Array, " B"],
    width: int | None = None,
) -> Float[Array, "B W H"]:
    """Block inputs: the target's raw embedding rows of [anchor, MASK x (W - 1)], scaled.

    Args:
        config: gives the mask token and ``input_embedding_scale``.
        embed_weight: the target's embedding weight; the embedding module may scale its output.
        anchor: last committed token of each sequence, ids in [0, V).
        width: W of a shorter block; ``config.block_size`` by default.
    """
    width = config.block_size if width is None else width
    block = ((0, 0), (0, width - 1))
    ids = jnp.pad(anchor[:, None], block, constant_values=config.mask_token_id)
    return embed_weight[ids] * config.input_embedding_scale


def logits(
    config: DrafterConfig, hidden: Float[Array, "B W H"], head_weight: Float[Array, "V H"]
) -> Float[Array, "B W V"]:
    """Draft logits through the target's head, multiplied, then soft-capped.

    Row k scores the token at row k's own position, so row 0, the anchor's, is not used.
    """
    scores = jnp.einsum("bwh,vh->bwv", hidden, head_weight, precision=Precision.HIGHEST)
    scores = scores * config.output_multiplier
    cap = config.final_logit_softcapping
    return scores if not cap or cap < 0 else jnp.tanh(scores / cap) * cap
