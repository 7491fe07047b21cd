"""Products in the form that is fast on the device; only the CPU's differs.

XLA's CPU compiler makes a product with a bfloat16 result ten times slower than one with a float32 result that
is rounded after. It also computes a product of one row by other code, with another rounding.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_bridge.weights.formats import Multiplier, Transposed, dot
from jax_bridge.weights.padding import HALVES, OUTPUTS, enlarged, enough_rows, whole_tiles


def linear_jax(
    rows: Float[Array, "... in"], weight: Any, bias: Float[Array, " out"] | None = None
) -> Float[Array, "... out"]:
    """``rows @ weight.T + bias``, rounded once; ``weight``: an array, or a format with its own product."""
    if isinstance(weight, Multiplier):
        return _summed_wide(rows, weight, bias)
    if isinstance(weight, Transposed):  # XLA would not merge a transpose into a branch of a conditional
        return _plus(jnp.einsum("...a,ab->...b", rows, weight.array), bias)
    if rows.dtype not in HALVES or rows.dtype != weight.dtype:
        return _as_it_is(rows, weight, bias)
    return jax.lax.platform_dependent(rows, weight, bias, cpu=_summed_wide, default=_as_it_is)


def _as_it_is(rows: Array, weight: Array, bias: Array | None) -> Array:
    return _plus(jnp.einsum("...a,ba->...b", rows, weight), bias)


def _plus(out: Array, bias: Array | None) -> Array:
    return out if bias is None else out + bias


def _summed_wide(rows: Array, weight: Any, bias: Array | None) -> Array:
    flat = rows.reshape(-1, rows.shape[-1])
    out = weight.product(flat) if isinstance(weight, Multiplier) else dot(flat, weight, jnp.float32)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out.astype(rows.dtype).reshape(*rows.shape[:-1], weight.shape[0])


def stacked_linear_jax(
    rows: Float[Array, "experts R in"], stack: Float[Array, "experts K L"], *, transposed: bool
) -> Float[Array, "experts R out"]:
    """`torch_dflash.ops.spread.stacked_linear`.

    The sum runs over the weights' axis in place: with a transpose XLA's CPU compiler copies one weight but
    not a stack of them, and rounds the two differently.
    """

    def as_it_is(rows: Array, stack: Array) -> Array:
        return jax.lax.dot_general(rows, stack, _stacked_axes(transposed))

    def wide(rows: Array, stack: Array) -> Array:
        return stacked_sums(rows, stack, transposed=transposed).astype(rows.dtype)

    return jax.lax.platform_dependent(rows, stack, cpu=wide, default=as_it_is)


def layer_of(stack: Array, at: Int[Array, " 1"]) -> Array:
    """The layer ``at`` of a stack, [1, ...]. No gather: on a TPU the slice is merged with a product.

    On a CPU XLA slices half precision as float32. With the barrier it cannot convert the whole stack before
    a loop over layers, which would take longer than the loop.
    """

    def own(stack: Array, at: Array) -> Array:
        return merged(*jax.lax.optimization_barrier((stack, at)))

    def merged(stack: Array, at: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(stack, at[0], 1)

    return jax.lax.platform_dependent(stack, at, cpu=own, default=merged)


def stacked_sums(rows: Array, stack: Array, *, transposed: bool) -> Float[Array, "experts R out"]:
    """`stacked_linear_jax` in float32 at least, as a CPU sums it."""
    size = whole_tiles(rows.dtype, rows.shape[2])
    many = enlarged(enlarged(rows, 1, enough_rows(rows.dtype, rows.shape[1])), 2, size)
    summed, other = (1, 2) if transposed else (2, 1)
    whole = enlarged(enlarged(stack, summed, size), other, OUTPUTS)
    sums = jnp.promote_types(rows.dtype, jnp.float32)
    out = jax.lax.dot_general(many, whole, _stacked_axes(transposed), preferred_element_type=sums)
    return out[:, : rows.shape[1], : stack.shape[other]]


def _stacked_axes(transposed: bool) -> Any:
    return (((2,), (1 if transposed else 2,)), ((0,), (0,)))
