"""Products of weights that are cut over a mesh, with explicit exchanges.

XLA's partitioner would choose exchanges by the number of rows; explicit ones are equal in all programs.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from jax_bridge.mesh.current import Slice
from jax_bridge.mesh.cut import GATHER, ROW, Cut, specs_of
from jax_bridge.mesh.shape import ALL
from jax_bridge.weights.codes import Groups
from jax_bridge.weights.formats import Multiplier, dot
from jax_bridge.weights.products import layer_of, linear_jax, stacked_linear_jax

P = PartitionSpec


def partitioned_linear(
    rows: Float[Array, "... in"], weight: Cut, bias: Array | None = None
) -> Float[Array, "... out"]:
    """`jax_bridge.weights.products.linear_jax` of a weight that is cut.

    Sums over chips are in float32 and rounded once, like one chip's: texts depend on them. Scales of codes
    multiply each chip's own sums.
    """
    cut, before = weight.partition, [None] * (rows.ndim - 1)
    given = specs_of(weight.array, cut)
    if cut.kind == ROW:
        sums = cut.on_parts(_row, (P(*before, cut.spec[1]), given), P())(rows, weight.array)
        return rounded(sums if bias is None else sums + bias.astype(sums.dtype), rows.dtype)
    axes = cut.spec[0]

    def local(rows: Array, part: Any, bias: Array | None) -> Array:
        out = linear_jax(rows, part, bias)
        return jax.lax.all_gather(out, axes, axis=out.ndim - 1, tiled=True) if cut.kind == GATHER else out

    made = P() if cut.kind == GATHER else P(*before, axes)
    return cut.on_parts(local, (P(), given, P(axes)), made)(rows, weight.array, bias)


def partitioned_stacked_linear(
    rows: Float[Array, "experts R in"], stack: Cut, *, transposed: bool
) -> Float[Array, "experts R out"]:
    """`torch_dflash.ops.spread.stacked_linear`, each chip with its experts; codes one expert at a time.

    The sums of all experts' groups in float32 would be many times the codes' bytes.
    """

    def local(rows: Array, part: Any) -> Array:
        if not isinstance(part, Groups):
            return stacked_linear_jax(rows, part, transposed=transposed)
        own = jnp.arange(len(rows))[:, None]
        return jax.lax.map(lambda at: part.one(at).products(layer_of(rows, at))[0], own)

    spec, given = stack.partition.spec, specs_of(stack.array, stack.partition)
    return stack.partition.on_parts(local, (spec, given), spec)(rows, stack.array)


def partitioned_stacked_sum(
    own: Slice, stack: Float[Array, "experts R H"], dtype: Any
) -> Float[Array, "R H"]:
    """`torch_dflash.ops.spread.stacked_sum`: over each chip's experts, then over chips."""

    def local(part: Array) -> Array:
        return jax.lax.psum(part.sum(axis=0), ALL)

    return rounded(own.on_parts(local, (P(ALL),), P())(stack), dtype)


def rounded(sums: Array, dtype: Any) -> Array:
    """Sums of float32 in ``dtype``.

    XLA moves a cast before the sum: each chip's summand would be rounded, and the result would depend on the
    ring's order, and so on the number of rows. It cannot move a ``reduce_precision``.
    """
    if jnp.finfo(dtype).bits < jnp.finfo(sums.dtype).bits:
        kind = jnp.finfo(dtype)
        sums = jax.lax.reduce_precision(sums, exponent_bits=kind.nexp, mantissa_bits=kind.nmant)
    return sums.astype(dtype)


def _row(rows: Array, part: Any) -> Array:
    """The sum over chips of this chip's product."""
    flat, kind = rows.reshape(-1, rows.shape[-1]), jnp.promote_types(rows.dtype, jnp.float32)
    sums = part.product(flat) if isinstance(part, Multiplier) else dot(flat, part, kind)
    return jax.lax.psum(sums, ALL).reshape(*rows.shape[:-1], part.shape[0])
