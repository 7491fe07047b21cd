"""Attention over a pool of pages: write new rows, then attend to all positions of each row."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.attention import AttentionInputs, KeyValue, grouped_attention, visible, with_rows
from torch_dflash.ops.lowerable import lowerable
from torch_dflash.ops.windows import positions, reach


class Pages(NamedTuple):
    """K and V of all rows: position p of row b is ``pool[table[b, p // page], :, p % page]``."""

    pool: Float[Tensor, "P G page_size KV"]
    table: Int[Tensor, "B row_pages"]


@lowerable
def paged_attention(
    inputs: AttentionInputs, pages: Pages
) -> tuple[Float[Tensor, "B M Q Dv"], Float[Tensor, "P G page_size KV"]]:
    """Write M new rows into the pages, then causal attention of these rows: (output, pool).

    The pool is consumed: written in place eagerly, donated under XLA. Positions past the table's columns are
    written to page 0 and must not be read back. Rows of a tree are not written: `append_pages` writes those
    of one path. This plain form gathers every row's pages; `jax_bridge.kernels` reads pages in place.
    """
    (pool, table), key, value, start, tree = pages, inputs.key, inputs.value, inputs.start, inputs.tree
    k_dim, v_dim = inputs.query.shape[3], value.shape[3]
    first = 0 if inputs.shared else k_dim
    if tree is None:
        pool = append_pages(*((value, key) if inputs.shared else (key, value)), start, pages)
    dense = pool[table.long()].transpose(1, 2).flatten(2, 3)
    slots = torch.arange(dense.shape[2], device=start.device, dtype=start.dtype)
    # Pages past a row's end are other rows', and a value there that is not finite would pass a zero weight.
    own = slots < (start if tree is not None else start + key.shape[2])[:, None]
    dense = torch.where(own[:, None, :, None], dense, 0)
    seen = visible(inputs.at, slots[None], inputs.window, causal=True) & own[:, None, None]
    seen = seen if inputs.chosen is None else seen & inputs.chosen
    part = KeyValue(dense[..., :k_dim], dense[..., first : first + v_dim], seen)
    if tree is not None:
        seen = max(dense.shape[2], reach(start, key.shape[2], dense.shape[2] + key.shape[2]))
        rows = inputs.joined()._replace(value=value)
        part = with_rows(rows, part.key, part.value, seen)
    return grouped_attention(inputs.query, [part], inputs.scale, inputs.sinks, inputs.softcap), pool


@lowerable
def append_pages(
    key: Float[Tensor, "B G M D"], value: Float[Tensor, "B G M Dv"], start: Int[Tensor, " B"], pages: Pages
) -> Float[Tensor, "P G page_size KV"]:
    """Write M rows of each sequence at positions from ``start`` on; consumes the pool and returns it."""
    pool, table = pages
    page, columns = pool.shape[2], table.shape[1]
    at = positions(start, key.shape[2])
    column = at // page
    number = table.gather(1, column.clamp(max=columns - 1).long())
    number = torch.where(column < columns, number, 0)
    fresh = side_by_side(key, value, pool.shape[3]).to(pool.dtype)
    pool[number.long(), :, (at % page).long()] = fresh.transpose(1, 2)
    return pool


def side_by_side(key: Tensor, value: Tensor, width: int) -> Float[Tensor, "B G M KV"]:
    """K and V of the new rows in the layout of a page."""
    return F.pad(torch.cat([key, value], dim=-1), (0, width - key.shape[3] - value.shape[3]))


def pool_width(k_dim: int, v_dim: int) -> int:
    """Lanes of a position in a page: K and V, padded to whole registers."""
    return -(-(k_dim + v_dim) // LANES) * LANES


LANES = 128
"""Width of a TPU's registers: K and V of a position are joined and padded to a multiple of it."""
