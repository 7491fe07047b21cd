"""Argmax and top-k of logits that are cut over the vocabulary: chips exchange (value, index) pairs."""

from __future__ import annotations

from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_bridge.kernels.row_reductions import argmax_jax
from jax_bridge.mesh.current import WHOLE, P, Slice, current
from jax_bridge.mesh.shape import ALL


def slice_under(rows: Array, dim: int | None) -> Slice | None:
    """The slice over which the vocabulary ``dim`` of ``rows`` is cut; None: it is whole."""
    own, last = current(), rows.ndim > 0 and dim in (-1, rows.ndim - 1)
    return own if own and last and rows.shape[-1] in own.vocabularies and _is_real(rows.dtype) else None


def argmax_on_slice(own: Slice, rows: Array, keepdim: bool = False) -> Array:
    """``torch.argmax`` over the last axis: the first of equal entries; NaN is larger than any number."""

    def local(part: Array) -> Array:
        at = argmax_jax(part, -1, True)
        value = jnp.take_along_axis(part, at, axis=-1)
        at = at + jax.lax.axis_index(ALL) * part.shape[-1]
        values, places = _of_all_chips(value, at)
        best = jnp.argmax(values, axis=-1, keepdims=True)
        place = jnp.take_along_axis(places, best, axis=-1)
        return place if keepdim else place[..., 0]

    return own.on_parts(local, (_cut(rows),), WHOLE)(rows)


def topk_on_slice(own: Slice, rows: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` largest entries of the last axis and their indices, in the order of `jax.lax.top_k`."""

    def local(part: Array) -> tuple[Array, Array]:
        values, at = jax.lax.top_k(part, min(count, part.shape[-1]))
        at = at + jax.lax.axis_index(ALL) * part.shape[-1]
        # Chip by chip, and by value in each: equal entries stay in the order of their indices.
        values, places = _of_all_chips(values, at)
        best, chosen = jax.lax.top_k(values, count)
        return best, jnp.take_along_axis(places, chosen, axis=-1)

    return own.on_parts(local, (_cut(rows),), (WHOLE, WHOLE))(rows)


def likeliest_on_slice(own: Slice, rows: Array, scale: Array, most: int) -> tuple[Array, Array, Array]:
    """`torch_dflash.ops.spread` in one exchange."""

    def local(part: Array, scale: Array) -> tuple[Array, Array, Array]:
        values, at = jax.lax.top_k(part, min(most, part.shape[-1]))
        at = at + jax.lax.axis_index(ALL) * part.shape[-1]
        top = _finite(values[..., :1])
        total = jax.nn.logsumexp((part - top) / scale, axis=-1, keepdims=True)
        values, places, totals, tops = _of_all_chips(values, at, total, top)
        best, chosen = jax.lax.top_k(values, min(most, rows.shape[-1]))
        total = jax.nn.logsumexp(totals + (tops - best[..., :1]) / scale, axis=-1)
        return best, jnp.take_along_axis(places, chosen, axis=-1), total

    return own.on_parts(local, (_cut(rows), WHOLE), (WHOLE, WHOLE, WHOLE))(rows, scale)


def _finite(top: Array) -> Array:
    """Zeros in place of infinities: a chip may have only -inf."""
    return jnp.where(jnp.isfinite(top), top, 0)


def _of_all_chips(*parts: Array) -> tuple[Array, ...]:
    """``parts`` of all chips along the last axis, chip by chip, in one exchange of integers."""
    ends = list(accumulate(part.shape[-1] for part in parts))
    own = jnp.concatenate([_bits(part) for part in parts], axis=-1)
    every = jax.lax.all_gather(own, ALL, axis=own.ndim - 1, tiled=True)
    chips = jnp.split(every.reshape(*own.shape[:-1], -1, ends[-1]), ends[:-1], axis=-1)
    pairs = zip(chips, parts, strict=True)
    return tuple(_values(one, part.dtype).reshape(*own.shape[:-1], -1) for one, part in pairs)


def _bits(part: Array) -> Array:
    return jax.lax.bitcast_convert_type(part.astype(jnp.float32), jnp.int32) if _is_real(part.dtype) else part


def _values(bits: Array, dtype: Any) -> Array:
    return jax.lax.bitcast_convert_type(bits, jnp.float32).astype(dtype) if _is_real(dtype) else bits


def _cut(rows: Array) -> Any:
    return P(*[None] * (rows.ndim - 1), ALL)


def _is_real(dtype: Any) -> bool:
    return jnp.issubdtype(dtype, jnp.floating)
