"""Static cache arrays: every position has its slot from the start, and rows are written in place.

A row's slots at or past its length are stale. They stay behind every mask until they are
overwritten, so rejected drafts need no clean-up.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int, Shaped

from jax_bridge.reference.attention import Rows


class Layer(NamedTuple):
    """One layer's keys and values, [B, G, S, D] each: slot = absolute position."""

    key: Float[Array, "B G S D"]
    value: Float[Array, "B G S D"]

    @property
    def batch(self) -> int:
        """Rows B."""
        return self.key.shape[0]

    @property
    def slots(self) -> int:
        """Positions S of a row."""
        return self.key.shape[2]

    def written(self, rows: Rows, start: Int[Array, " B"]) -> tuple["Layer", Rows]:
        """The layer with K and V [B, G, R, D] at ``start[b]``, and all it then holds: [B, G, S, D]."""
        layer = write_layer(self, rows, start)
        return layer, (layer.key, layer.value)


def empty_layer(batch: int, heads: int, slots: int, dim: int, dtype: DTypeLike) -> Layer:
    """Zeros: a slot behind the mask has weight 0, and 0 times what was never written must be 0."""
    shape = (batch, heads, slots, dim)
    return Layer(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))


def write_layer(layer: Layer, rows: Rows, start: Int[Array, " B"]) -> Layer:
    """Put keys and values [B, G, R, D] at ``start[b]``."""
    return Layer(put_rows(layer.key, rows[0], start, axis=2), put_rows(layer.value, rows[1], start, axis=2))


def put_rows(
    buffer: Shaped[Array, "B *slots"], rows: Shaped[Array, "B *rows"], start: Int[Array, " B"], axis: int
) -> Shaped[Array, "B *slots"]:
    """``buffer`` with row b of ``rows`` at ``start[b]`` along ``axis``.

    ``start[b] + rows.shape[axis]`` must lie within the buffer: XLA moves a window that does not.
    """
    for row in range(buffer.shape[0]):
        at: list = [0] * buffer.ndim
        at[0], at[axis] = row, start[row]
        buffer = jax.lax.dynamic_update_slice(buffer, rows[row : row + 1].astype(buffer.dtype), at)
    return buffer


def positions(start: Int[Array, " B"], count: int) -> Int[Array, "B count"]:
    """Absolute positions of ``count`` rows from ``start[b]`` on."""
    return start[:, None] + jnp.arange(count, dtype=start.dtype)
