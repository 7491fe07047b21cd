"""The best of logits that are cut over the vocabulary: chips exchange (value, index) pairs."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array

from jax_bridge.argmax import argmax_jax
from jax_bridge.mesh.current import WHOLE, P, Slice, current
from jax_bridge.mesh.shape import ALL


def slice_under(rows: Array, dim: int | None) -> Slice | None:
    """The slice over which ``dim`` of ``rows``, a vocabulary, is cut; None: it is not."""
    own, last = current(), rows.ndim > 0 and dim in (-1, rows.ndim - 1)
    return own if own and last and rows.shape[-1] in own.vocabularies and _is_real(rows) else None


def argmax_on_slice(own: Slice, rows: Array, keepdim: bool = False) -> Array:
    """``torch.argmax`` over the last axis: of equal entries the first; NaN is larger than any number."""

    def local(part: Array) -> Array:
        at = argmax_jax(part, -1, True)
        value = jnp.take_along_axis(part, at, axis=-1)
        at = at + jax.lax.axis_index(ALL) * part.shape[-1]
        values, places = (_of_all_chips(one) for one in (value, at))
        best = jnp.argmax(values, axis=-1, keepdims=True)
        place = jnp.take_along_axis(places, best, axis=-1)
        return place if keepdim else place[..., 0]

    return own.on_parts(local, (_cut(rows),), WHOLE)(rows)


def topk_on_slice(own: Slice, rows: Array, count: int) -> tuple[Array, Array]:
    """The ``count`` largest entries of the last axis and their places, as `jax.lax.top_k` orders them."""

    def local(part: Array) -> tuple[Array, Array]:
        values, at = jax.lax.top_k(part, min(count, part.shape[-1]))
        at = at + jax.lax.axis_index(ALL) * part.shape[-1]
        # Chip by chip, in each by value: of equal entries the first comes first here too.
        values, places = (_of_all_chips(one) for one in (values, at))
        best, chosen = jax.lax.top_k(values, count)
        return best, jnp.take_along_axis(places, chosen, axis=-1)

    return own.on_parts(local, (_cut(rows),), (WHOLE, WHOLE))(rows)


def _of_all_chips(part: Array) -> Array:
    return jax.lax.all_gather(part, ALL, axis=part.ndim - 1, tiled=True)


def _cut(rows: Array) -> Any:
    return P(*[None] * (rows.ndim - 1), ALL)


def _is_real(rows: Array) -> bool:
    return jnp.issubdtype(rows.dtype, jnp.floating)
