"""A linear layer's product in the form that the device is fast at; only the CPU's differs.

XLA's CPU compiler makes a product with a bfloat16 result ten times slower than one with a float32 result that
is rounded after.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from jax_bridge.forms import Multiplier, dot

HALVES = (jnp.bfloat16, jnp.float16)


def linear_jax(
    rows: Float[Array, "... in"], weight: Any, bias: Float[Array, " out"] | None = None
) -> Float[Array, "... out"]:
    """``rows @ weight.T + bias``, rounded once; ``weight``: an array, or a form that multiplies itself."""
    if isinstance(weight, Multiplier):
        return _summed_wide(rows, weight, bias)
    if rows.dtype not in HALVES or rows.dtype != weight.dtype:
        return _as_it_is(rows, weight, bias)
    return jax.lax.platform_dependent(rows, weight, bias, cpu=_summed_wide, default=_as_it_is)


def _as_it_is(rows: Array, weight: Array, bias: Array | None) -> Array:
    out = jnp.einsum("...a,ba->...b", rows, weight)
    return out if bias is None else out + bias


def _summed_wide(rows: Array, weight: Any, bias: Array | None) -> Array:
    flat = rows.reshape(-1, rows.shape[-1])
    out = weight.product(flat) if isinstance(weight, Multiplier) else dot(flat, weight, jnp.float32)
    out = out if bias is None else out + bias.astype(jnp.float32)
    return out.astype(rows.dtype).reshape(*rows.shape[:-1], weight.shape[0])
