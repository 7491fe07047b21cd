"""A paged target cache in plain JAX: gathers every row's pages and masks positions past its length.

Position p of row b is ``pool[table[b, p // page], :, p % page]``: K and V side by side, then zeros up to a
whole number of lanes. No row owns page 0: rows at positions without a page are written to page 0.
"""

from typing import NamedTuple

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from jax_bridge.reference.attention import Rows
from jax_bridge.reference.config import TargetConfig
from jax_bridge.reference.static import positions

LANES = 128


class PagedLayer(NamedTuple):
    """Keys and values of one layer, and the page numbers of each row, of which each layer has a copy."""

    pool: Float[Array, "P G page_size KV"]
    table: Int[Array, "B row_pages"]

    @property
    def slots(self) -> int:
        """Positions of a row."""
        return self.table.shape[1] * self.pool.shape[2]

    def written(self, rows: Rows, start: Int[Array, " B"]) -> tuple["PagedLayer", Rows]:
        """The layer with K and V [B, G, R, D] at ``start[b]``, and the K and V [B, G, S, D] of all slots."""
        keys, values = rows
        page, columns, dim = self.pool.shape[2], self.table.shape[1], keys.shape[3]
        at = positions(start, keys.shape[2])
        column = at // page
        number = jnp.take_along_axis(self.table, jnp.minimum(column, columns - 1), axis=1)
        number = jnp.where(column < columns, number, 0)
        joined = jnp.concatenate([keys, values], axis=-1)
        joined = jnp.pad(joined, ((0, 0), (0, 0), (0, 0), (0, self.pool.shape[3] - 2 * dim)))
        fresh = joined.transpose(0, 2, 1, 3).astype(self.pool.dtype)
        layer = PagedLayer(self.pool.at[number, :, at % page].set(fresh), self.table)
        held = layer.rows()
        return layer, (held[..., :dim], held[..., dim : 2 * dim])

    def rows(self) -> Float[Array, "B G S KV"]:
        """K and V of each row in the order of positions; those past the row's length are stale."""
        pages = self.pool[self.table].transpose(0, 2, 1, 3, 4)
        return pages.reshape(*pages.shape[:2], -1, pages.shape[-1])


def empty_pages(
    config: TargetConfig, table: Int[np.ndarray, "B row_pages"], pages: int, page_size: int, dtype: DTypeLike
) -> tuple[PagedLayer, ...]:
    """Zeroed pools [P, G, page_size, KV] of every decoder layer, for rows with the pages of ``table``.

    Args:
        config: the target's.
        table: page numbers, int32 [B, row_pages], each once; 0: no page.
        pages: pages P of a pool, page 0 included.
        page_size: positions in a page.
        dtype: dtype of keys and values.
    """
    width = -(-2 * config.head_dim // LANES) * LANES
    shape = (pages, config.num_key_value_heads, page_size, width)
    layers = range(config.num_hidden_layers)
    return tuple(PagedLayer(jnp.zeros(shape, dtype), jnp.array(table, jnp.int32)) for _ in layers)
