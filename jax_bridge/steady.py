"""Sums over a row that do not depend on the rows beside it.

XLA's CPU compiler orders a sum by the shape of the whole array, so a pass of one row rounds otherwise than a
pass of eight. In float32 that decides nothing but ties; rounded to bfloat16 or to 8 bits it decides tokens.
Sums of halves are additions of arrays, which have one order. Products are steady as `jax_bridge.padding` has
them.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


@jax.custom_jvp
def sum_of_halves(rows: Float[Array, "... n"]) -> Float[Array, "... one"]:
    """The sum over the last axis, which stays, as halves added to halves."""
    if not rows.shape[-1]:
        return jnp.zeros((*rows.shape[:-1], 1), rows.dtype)
    while (count := rows.shape[-1]) > 1:
        half = count // 2
        left, right, odd = jnp.split(rows, [half, 2 * half], axis=-1)
        rows = left + right
        if count % 2:
            rows = jnp.concatenate([rows[..., :1] + odd, rows[..., 1:]], axis=-1)
    return rows


@sum_of_halves.defjvp
def _sum_of_changes(given, changes):
    (rows,), (change,) = given, changes
    return sum_of_halves(rows), jnp.sum(change, axis=-1, keepdims=True)


def row_sum(rows: Float[Array, "... n"]) -> Float[Array, "... one"]:
    """The sum over the last axis, which stays; steady on a CPU."""

    def whole(rows: Array) -> Array:
        return rows.sum(axis=-1, keepdims=True)

    return jax.lax.platform_dependent(rows, cpu=sum_of_halves, default=whole)


def mean_jax(rows: Array, dim: Any = None, keepdim: bool = False) -> Array:
    """``torch.mean``; over the last axis it is steady."""
    axes = (dim,) if isinstance(dim, int) else dim
    if not axes or len(axes) > 1 or not _is_last(axes[0], rows):
        return jnp.mean(rows, axes if axes and rows.ndim else None, keepdims=keepdim)
    out = (row_sum(_wide(rows)) / rows.shape[-1]).astype(rows.dtype)
    return out if keepdim else out[..., 0]


def softmax_jax(rows: Array, dim: int) -> Array:
    """``torch.softmax``; over the last axis it is steady."""
    if not rows.size:
        return rows
    if not _is_last(dim, rows):
        return jax.nn.softmax(jnp.atleast_1d(rows), dim).reshape(rows.shape)
    wide = _wide(rows)
    weights = jnp.exp(wide - jax.lax.stop_gradient(wide.max(axis=-1, keepdims=True)))
    return (weights / row_sum(weights)).astype(rows.dtype)


def layer_norm_jax(
    rows: Array, weight: Array | None, bias: Array | None, eps: float
) -> tuple[Array, Array, Array]:
    """``torch.native_layer_norm`` over the last axis: the rows, their means and one over their deviations.

    Computed in float32 at least, rounded once.
    """
    wide = _wide(rows)
    mean = mean_jax(wide, -1, keepdim=True)
    spread = jax.lax.rsqrt(mean_jax(jnp.square(wide - mean), -1, keepdim=True) + eps)
    out = (wide - mean) * spread
    out = out if weight is None else out * weight
    out = out if bias is None else out + bias
    return out.astype(rows.dtype), mean, spread


def _wide(rows: Array) -> Array:
    """In float32 at least, to be rounded once."""
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))


def _is_last(dim: int, rows: Array) -> bool:
    """Whether ``dim`` is the last axis of an array of real numbers."""
    return rows.ndim > 0 and dim in (-1, rows.ndim - 1) and jnp.issubdtype(rows.dtype, jnp.floating)
