"""Cosines and sines of positions, computed once a pass.

XLA's CPU compiler would compute them anew wherever they are multiplied: in each layer, for each head. What
comes out of a loop it takes as it is.
"""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array

LARGE = 1e30


def _once_a_pass(function: Callable[[Array], Array], angles: Array) -> Array:
    """``function(angles)``, from a loop of one turn. XLA undoes a loop whose turns it can count."""
    if not angles.size:
        return function(angles)

    def looped(angles: Array) -> Array:
        turns = 1 + (angles.reshape(-1)[0] > LARGE).astype(jnp.int32)  # a second would find the same

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
