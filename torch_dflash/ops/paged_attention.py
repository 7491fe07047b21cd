"""Attention over pages that all rows share: write new rows, then attend to all of a row."""

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

    The pool is consumed: eagerly it is written in place, under XLA donated. Positions past the table's
    columns are written to page 0 and must not be read back. Rows of a tree are not written: `append_pages`
    does so with those of one path. This is the plain form, which gathers every row's pages;
    `jax_bridge.kernels` has those that read pages where they lie.
    """
    (pool, table), key, value, start, tree = pages, inputs.key, inputs.value, inputs.start, inputs.tree
    k_dim, v_dim = key.shape[3], value.shape[3]
    if tree is None:
        pool = append_pages.plain(key, value, start, pages)
    dense = pool[table.long()].transpose(1, 2).flatten(2, 3)
    slots = torch.arange(dense.shape[2], device=start.device, dtype=start.dtype)
    # Behind a row's end lie other rows' pages, and what is not finite there would pass a weight of zero.
    own = slots < (start if tree is not None else start + key.shape[2])[:, None]
    dense = torch.where(own[:, None, :, None], dense, 0)
    seen = visible(inputs.at, slots[None], inputs.window, causal=True) & own[:, None, None]
    part = KeyValue(dense[..., :k_dim], dense[..., k_dim : k_dim + v_dim], seen)
    if tree is not None:
        seen = max(dense.shape[2], reach(start, key.shape[2], dense.shape[2] + key.shape[2]))
        part = with_rows(inputs, part.key, part.value, seen)
    return grouped_attention(inputs.query, [part], inputs.scale, inputs.sinks, inputs.softcap), pool


@lowerable
def append_pages(
    key: Float[Tensor, "B G M D"], value: Float[Tensor, "B G M Dv"], start: Int[Tensor, " B"], pages: Pages
) -> Float[Tensor, "P G page_size KV"]:
    """The pool with M rows more of each sequence at positions from ``start`` on; the pool is consumed."""
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
    """K and V of the new rows as they lie in a page."""
    return F.pad(torch.cat([key, value], dim=-1), (0, width - key.shape[3] - value.shape[3]))


def pool_width(k_dim: int, v_dim: int) -> int:
    """Lanes of a position in a page: K and V, in whole registers."""
    return -(-(k_dim + v_dim) // LANES) * LANES


LANES = 128
"""K and V of a position lie side by side, padded to a multiple of this: the width of a TPU's registers."""
