"""Grouped-query attention: projections, masks, and one softmax over keys in several arrays.

Drafter and target project in the same way: heads of ``head_dim``, RMSNorm on queries and keys where the
checkpoint has the norm, rotary positions. Every function takes the checkpoint name of its tensors.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Bool, Float, Int

from jax_bridge.reference.config import DecoderConfig, LayerMask
from jax_bridge.reference.rope import rotate

Params = Mapping[str, jax.Array]


def linear(params: Params, name: str, rows: Float[Array, "B R in"]) -> Float[Array, "B R out"]:
    """``rows @ weight.T``, plus the bias if the checkpoint has a bias."""
    out = jnp.einsum("...i,oi->...o", rows, params[f"{name}.weight"], precision=Precision.HIGHEST)
    bias = params.get(f"{name}.bias")
    return out if bias is None else out + bias


def rms_norm(params: Params, name: str, rows: Float[Array, "*rows D"], eps: float) -> Float[Array, "*rows D"]:
    """RMSNorm over the last axis in float32; the weight multiplies in the input's dtype."""
    wide = rows.astype(jnp.float32)
    wide = wide * jax.lax.rsqrt(jnp.mean(jnp.square(wide), axis=-1, keepdims=True) + eps)
    return params[f"{name}.weight"] * wide.astype(rows.dtype)


def swiglu(params: Params, name: str, rows: Float[Array, "B W H"]) -> Float[Array, "B W H"]:
    """Gated MLP: down(silu(gate(x)) * up(x))."""
    gate = jax.nn.silu(linear(params, f"{name}.gate_proj", rows))
    return linear(params, f"{name}.down_proj", gate * linear(params, f"{name}.up_proj", rows))


Rows = tuple[jax.Array, jax.Array]


class Seen(NamedTuple):
    """Keys and values [B, G, S, D], and the mask of the keys that query rows see: bool [B or 1, M, S]."""

    keys: jax.Array
    values: jax.Array
    visible: jax.Array


def project_queries(
    params: Params, name: str, config: DecoderConfig, rows: Float[Array, "B M H"], tables: Rows
) -> Float[Array, "B Q M D"]:
    """Queries of ``rows``, normed (if there is a norm) and rotated."""
    return rotate(_normed_heads(params, name, "q", config, rows), *tables)


def project_keys_values(
    params: Params, name: str, config: DecoderConfig, rows: Float[Array, "B R H"], tables: Rows
) -> Rows:
    """Keys, normed (if there is a norm) and rotated, and values [B, G, R, D] of ``rows``.

    Values that are not finite become 0 and their keys NaN: a mask gives a key weight 0, but 0 * NaN is NaN.
    """
    keys = rotate(_normed_heads(params, name, "k", config, rows), *tables)
    values = _heads(linear(params, f"{name}.v_proj", rows), config.head_dim)
    bad = ~jnp.isfinite(values).all(axis=-1, keepdims=True)
    return jnp.where(bad, jnp.nan, keys), jnp.where(bad, 0, values)


def attend(queries: Float[Array, "B Q M D"], parts: list[Seen]) -> Float[Array, "B M QD"]:
    """One softmax, in float32, over all ``parts``: query head q reads key head q // (Q / G).

    Parts share one sum of weights, so a long cache is read in place.
    """
    batch, heads, count, dim = queries.shape
    grouped = queries.reshape(batch, parts[0].keys.shape[1], -1, count, dim)
    scores = []
    for keys, _, seen in parts:
        score = jnp.einsum("bgrmd,bgsd->bgrms", grouped, keys, precision=Precision.HIGHEST)
        scores.append(jnp.where(seen[:, None, None], score.astype(jnp.float32) * dim**-0.5, -jnp.inf))
    top = jnp.max(jnp.stack([score.max(axis=-1) for score in scores]), axis=0)[..., None]
    weights = [jnp.exp(score - top) for score in scores]
    total = sum(weight.sum(axis=-1, keepdims=True) for weight in weights)
    mixed = jnp.zeros((), queries.dtype)
    for weight, part in zip(weights, parts, strict=True):
        share = (weight / total).astype(part.values.dtype)
        mixed += jnp.einsum("bgrms,bgsd->bgrmd", share, part.values, precision=Precision.HIGHEST)
    return mixed.reshape(batch, heads, count, dim).transpose(0, 2, 1, 3).reshape(batch, count, -1)


def visible(mask: LayerMask, query: Int[Array, "B M"], key: Int[Array, "B S"]) -> Bool[Array, "B M S"]:
    """Rule of ``LayerMask`` by absolute positions of query and key rows; either batch may be 1."""
    back = query[:, :, None] - key[:, None, :]
    seen = back >= 0 if mask.causal else jnp.ones_like(back, bool)
    return seen if mask.window is None else seen & (jnp.abs(back) < mask.window)


def _normed_heads(params: Params, name: str, kind: str, config: DecoderConfig, rows: jax.Array) -> jax.Array:
    heads = _heads(linear(params, f"{name}.{kind}_proj", rows), config.head_dim)
    norm = f"{name}.{kind}_norm"
    return rms_norm(params, norm, heads, config.rms_norm_eps) if f"{norm}.weight" in params else heads


def _heads(rows: Float[Array, "B R width"], dim: int) -> Float[Array, "B heads R D"]:
    return rows.reshape(*rows.shape[:2], -1, dim).transpose(0, 2, 1, 3)
