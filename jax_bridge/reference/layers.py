"""The drafter's parts: attention over context and block rows, RMSNorm, SwiGLU, linear maps.

Every part takes the flat parameter mapping and the checkpoint name of its tensors.
"""

from collections.abc import Mapping

import jax
import jax.numpy as jnp
from jax.lax import Precision
from jaxtyping import Array, Bool, Float

from jax_bridge.reference.config import DrafterConfig, LayerMask
from jax_bridge.reference.rope import rotate

Params = Mapping[str, jax.Array]
Rows = tuple[jax.Array, jax.Array]


def attention(
    params: Params,
    name: str,
    config: DrafterConfig,
    mask: LayerMask,
    block: Float[Array, "B W H"],
    context: Float[Array, "B n_rows H"],
    tables: Rows,
    past: Rows | None,
) -> tuple[Float[Array, "B W H"], Rows]:
    """Block rows attend to the whole context and to the block.

    Args:
        params: tensors by checkpoint name.
        name: prefix of this layer's attention tensors.
        config: head sizes and the norm's epsilon.
        mask: what block rows may see in this layer.
        block: input-normed block rows.
        context: new context features, as they are: no layer norm.
        tables: cosine and sine [B, 1, n_rows + W, D] for the new context rows and the block.
        past: K and V [B, G, S, D] of earlier context rows, K normed and rotated.

    Returns:
        The attention output and K, V of all context rows, old and new.
    """
    new, width = context.shape[1], block.shape[1]
    rows = jnp.concatenate([context, block], axis=1)
    cos, sin = tables
    queries = _heads(linear(params, f"{name}.q_proj", block), config.head_dim)
    queries = rms_norm(params, f"{name}.q_norm", queries, config.rms_norm_eps)
    queries = rotate(queries, cos[:, :, new:], sin[:, :, new:])
    keys = _heads(linear(params, f"{name}.k_proj", rows), config.head_dim)
    keys = rotate(rms_norm(params, f"{name}.k_norm", keys, config.rms_norm_eps), cos, sin)
    values = _heads(linear(params, f"{name}.v_proj", rows), config.head_dim)
    if past is not None:
        keys = jnp.concatenate([past[0], keys], axis=2)
        values = jnp.concatenate([past[1], values], axis=2)
    committed = keys.shape[2] - width
    mixed = _attend(queries, keys, values, _visible(mask, committed, width))
    return linear(params, f"{name}.o_proj", mixed), (
        keys[:, :, :committed],
        values[:, :, :committed],
    )


def _attend(
    queries: Float[Array, "B Q W D"],
    keys: Float[Array, "B G S D"],
    values: Float[Array, "B G S D"],
    visible: Bool[Array, "W S"],
) -> Float[Array, "B W QD"]:
    """Grouped-query attention: query head q reads key head q // (Q / G). Softmax in float32."""
    batch, heads, width, dim = queries.shape
    grouped = queries.reshape(batch, keys.shape[1], -1, width, dim)
    scores = jnp.einsum("bgrwd,bgsd->bgrws", grouped, keys, precision=Precision.HIGHEST)
    scores = jnp.where(visible, scores.astype(jnp.float32) * dim**-0.5, -jnp.inf)
    weights = jax.nn.softmax(scores, axis=-1).astype(values.dtype)
    mixed = jnp.einsum("bgrws,bgsd->bgrwd", weights, values, precision=Precision.HIGHEST)
    mixed = mixed.reshape(batch, heads, width, dim)
    return mixed.transpose(0, 2, 1, 3).reshape(batch, width, heads * dim)


def _visible(mask: LayerMask, committed: int, width: int) -> Bool[Array, "W S"]:
    """Rule of ``LayerMask`` for a block that follows ``committed`` context rows."""
    query = committed + jnp.arange(width)[:, None]
    back = query - jnp.arange(committed + width)[None, :]
    visible = back >= 0 if mask.causal else jnp.ones_like(back, bool)
    return visible if mask.window is None else visible & (jnp.abs(back) < mask.window)


def _heads(rows: Float[Array, "B S ND"], dim: int) -> Float[Array, "B N S D"]:
    return rows.reshape(*rows.shape[:2], -1, dim).transpose(0, 2, 1, 3)


def linear(params: Params, name: str, rows: Float[Array, "B S I"]) -> Float[Array, "B S O"]:
    """``rows @ weight.T``, plus the bias where the checkpoint has one."""
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
