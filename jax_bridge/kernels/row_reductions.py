"""Row-wise reductions that XLA's CPU compiler computes slowly, or with roundings that depend on the batch.

XLA's CPU compiler orders a sum by the shape of the whole array, so a pass of one row rounds differently from
a pass of eight. In float32 that decides nothing but ties; rounded to bfloat16 or to 8 bits it decides tokens.
A sum of halves adds arrays, in one order for all shapes. For products see `jax_bridge.weights.padding`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from torch_dflash.ops.paged_attention import LANES


@jax.custom_jvp
def pairwise_sum(rows: Float[Array, "... n"]) -> Float[Array, "... one"]:
    """The sum over the last axis, kept as length 1, as halves added to halves."""
    if not rows.shape[-1]:
        return jnp.zeros((*rows.shape[:-1], 1), rows.dtype)
    while (count := rows.shape[-1]) > 1:
        half = count // 2
        left, right, odd = jnp.split(rows, [half, 2 * half], axis=-1)
        rows = left + right
        if count % 2:
            rows = jnp.concatenate([rows[..., :1] + odd, rows[..., 1:]], axis=-1)
    return rows


@pairwise_sum.defjvp
def _sum_of_changes(given, changes):
    (rows,), (change,) = given, changes
    return pairwise_sum(rows), jnp.sum(change, axis=-1, keepdims=True)


def row_sum(rows: Float[Array, "... n"]) -> Float[Array, "... one"]:
    """The sum over the last axis, kept as length 1; on a CPU independent of the batch."""

    def whole(rows: Array) -> Array:
        return rows.sum(axis=-1, keepdims=True)

    return jax.lax.platform_dependent(rows, cpu=pairwise_sum, default=whole)


def mean_jax(rows: Array, dim: Any = None, keepdim: bool = False) -> Array:
    """``torch.mean``; over the last axis independent of the batch."""
    axes = (dim,) if isinstance(dim, int) else dim
    if not axes or len(axes) > 1 or not _is_last(axes[0], rows):
        return jnp.mean(rows, axes if axes and rows.ndim else None, keepdims=keepdim)
    out = (row_sum(_wide(rows)) / rows.shape[-1]).astype(rows.dtype)
    return out if keepdim else out[..., 0]


def softmax_jax(rows: Array, dim: int) -> Array:
    """``torch.softmax``; over the last axis independent of the batch."""
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
    """``torch.native_layer_norm`` over the last axis: (rows, means, reciprocal standard deviations).

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
    return rows.astype(jnp.promote_types(rows.dtype, jnp.float32))


def _is_last(dim: int, rows: Array) -> bool:
    """Whether ``dim`` is the last axis of an array of real numbers."""
    return rows.ndim > 0 and dim in (-1, rows.ndim - 1) and jnp.issubdtype(rows.dtype, jnp.floating)


# On a CPU XLA searches value and index in one scalar loop: over a vocabulary of 49,152 that takes twenty
# times as long as the maximum of each block and then the index in one block.
BLOCK, FEWEST = 256, 64
"""Entries of a block, and of the smallest block that is used without padding."""


def argmax_jax(rows: Array, dim: int | None = None, keepdim: bool = False) -> Array:
    """``torch.argmax``: of equal entries the first; NaN is larger than any number."""
    if not rows.ndim:
        return jnp.zeros((), jnp.int32)
    plain = partial(jnp.argmax, axis=dim, keepdims=keepdim)
    is_last = dim in (-1, rows.ndim - 1)
    if not is_last or rows.shape[-1] <= BLOCK or not jnp.issubdtype(rows.dtype, jnp.floating):
        return plain(rows)

    def by_blocks(rows: Array) -> Array:
        place = argmax_by_blocks(rows)
        return (place[..., None] if keepdim else place).astype(jax.eval_shape(plain, rows).dtype)

    return jax.lax.platform_dependent(rows, cpu=by_blocks, default=plain)


def argmax_by_blocks(rows: Float[Array, "*rows n"]) -> Int[Array, "*rows"]:
    """The index of the largest entry of the last axis, by blocks."""
    count = rows.shape[-1]
    size = math.gcd(count, BLOCK)
    if size < FEWEST:
        size, missing = BLOCK, -count % BLOCK
        rows = jnp.pad(rows, [(0, 0)] * (rows.ndim - 1) + [(0, missing)], constant_values=-jnp.inf)
    blocks = rows.reshape(*rows.shape[:-1], -1, size)
    strange = jnp.isnan(blocks).any(axis=-1)  # XLA's CPU compiler loses NaN in a maximum
    best = jnp.argmax(jnp.where(strange, jnp.nan, blocks.max(axis=-1)), axis=-1)
    inside = jnp.take_along_axis(blocks, best[..., None, None], axis=-2, mode="clip")[..., 0, :]
    return best * size + jnp.argmax(inside, axis=-1)


# On a CPU XLA would recompute cosines and sines at every use: in each layer, for each head. The result of a
# loop is computed once.
LARGE = 1e30


def _once_a_pass(function: Callable[[Array], Array], angles: Array) -> Array:
    """``function(angles)`` from a loop of one turn. XLA unrolls a loop whose turns it can count."""
    if not angles.size:
        return function(angles)

    def looped(angles: Array) -> Array:
        turns = 1 + (angles.reshape(-1)[0] > LARGE).astype(jnp.int32)  # a second turn would change nothing

        def turn(carry: tuple[Array, Array]) -> tuple[Array, Array]:
            return carry[0] + 1, function(angles)

        begin = jnp.int32(0), jnp.zeros_like(angles)
        return jax.lax.while_loop(lambda carry: carry[0] < turns, turn, begin)[1]

    return jax.lax.platform_dependent(angles, cpu=looped, default=function)


@jax.custom_jvp
def cos_jax(angles: Array) -> Array:
    """``torch.cos`` of real numbers."""
    return _once_a_pass(jnp.cos, angles)


@jax.custom_jvp
def sin_jax(angles: Array) -> Array:
    """``torch.sin`` of real numbers."""
    return _once_a_pass(jnp.sin, angles)


cos_jax.defjvps(lambda change, out, angles: -jnp.sin(angles) * change)
sin_jax.defjvps(lambda change, out, angles: jnp.cos(angles) * change)


FEW_IDS = 512


def spread_jax(ids: Array, values: Array, *, size: int) -> Array:
    """`torch_dflash.ops.spread`: by comparisons on a TPU where ids are few, else by a scatter."""
    scatter = partial(spread_by_scatter, size=size)
    on_tpu = partial(spread_by_comparing, size=size) if ids.shape[2] <= FEW_IDS else scatter
    return jax.lax.platform_dependent(ids, values, tpu=on_tpu, default=scatter)


def spread_by_comparing(ids: Array, values: Array, *, size: int) -> Array:
    """One pass over ids and vocabulary, without intermediates in memory."""
    vocabulary = jnp.arange(size, dtype=ids.dtype)
    return jnp.where(ids[..., None] == vocabulary, values[..., None], 0).sum(axis=2, dtype=values.dtype)


def spread_by_scatter(ids: Array, values: Array, *, size: int) -> Array:
    """A scatter-add."""
    batch, rows = jnp.indices(ids.shape[:2], sparse=True)
    empty = jnp.zeros((*ids.shape[:2], size), values.dtype)
    return empty.at[batch[..., None], rows[..., None], ids].add(values)


def marked_jax(ids: Int[Array, "B M K"], *, size: int) -> Bool[Array, "B M V"]:
    """`torch_dflash.ops.spread.marked`: a product on a TPU, else a scatter."""
    product, scatter = (partial(form, size=size) for form in (mark_by_product, mark_by_scatter))
    return jax.lax.platform_dependent(ids, tpu=product, default=scatter)


def mark_by_product(ids: Int[Array, "B M K"], size: int) -> Bool[Array, "B M V"]:
    """Ids as ``128 high + low``: ones at each high times ones at each low, exact in bfloat16.

    A scatter runs id by id.
    """
    high, low = ids // LANES, ids % LANES
    highs = (jnp.arange(-(-size // LANES), dtype=ids.dtype)[:, None] == high[..., None, :]).astype(
        jnp.bfloat16
    )
    lows = (jnp.arange(LANES, dtype=ids.dtype)[:, None] == low[..., None, :]).astype(jnp.bfloat16)
    found = jnp.einsum("bmhk,bmlk->bmhl", highs, lows, preferred_element_type=jnp.float32)
    return found.reshape(*ids.shape[:2], -1)[..., :size] > 0.5


def mark_by_scatter(ids: Int[Array, "B M K"], size: int) -> Bool[Array, "B M V"]:
    """A scatter of ones."""
    batch, rows = jnp.indices(ids.shape[:2], sparse=True)
    return jnp.zeros((*ids.shape[:2], size), bool).at[batch[..., None], rows[..., None], ids].set(True)
