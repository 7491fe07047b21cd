"""Values of a few ids, spread over a vocabulary: how `torch_dflash.ops.spread` lowers."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
from jaxtyping import Array

FEW_IDS = 512


def spread_jax(ids: Array, values: Array, *, size: int) -> Array:
    """`torch_dflash.ops.spread`: by comparing on a TPU, as long as ids are few, else by a scatter."""
    scatter = partial(spread_by_scatter, size=size)
    on_tpu = partial(spread_by_comparing, size=size) if ids.shape[2] <= FEW_IDS else scatter
    return jax.lax.platform_dependent(ids, values, tpu=on_tpu, default=scatter)


def spread_by_comparing(ids: Array, values: Array, *, size: int) -> Array:
    """One pass over ids and vocabulary, in which nothing is stored."""
    vocabulary = jnp.arange(size, dtype=ids.dtype)
    return jnp.where(ids[..., None] == vocabulary, values[..., None], 0).sum(axis=2, dtype=values.dtype)


def spread_by_scatter(ids: Array, values: Array, *, size: int) -> Array:
    """Entry by entry."""
    batch, rows = jnp.indices(ids.shape[:2], sparse=True)
    empty = jnp.zeros((*ids.shape[:2], size), values.dtype)
    return empty.at[batch[..., None], rows[..., None], ids].add(values)
