"""The body of the paged attention kernel: one half (`Halves`), one sequence, one tile of query rows.

It copies K and V of a page at once, a block of pages at a time and one block ahead, and keeps a running
softmax. It never reads its own writes: the last, partly filled tile of old rows and the new rows are merged
on the chip. After all pages the kernel attends to them there, while they are copied out. Copies to and from
pages are of whole tiles. Rows of a tree are merged and attended to in the same way, and not copied out.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from jax_bridge.kernels.halves import Halves
from jax_bridge.kernels.online_softmax import SoftmaxRefs, product
from torch_dflash.plan import TILE

# For integers that are not negative; `//` and `%` would query the chip.
div, rem = jax.lax.div, jax.lax.rem


class Kind(NamedTuple):
    """Static values, as in `paged_attention`; ``rows`` of a call, ``tile_rows`` of a program.

    ``k_dim``: lanes of a key, behind which the value lies; 0 where it lies in the key's first lanes.
    """

    k_dim: int
    rows: int
    tile_rows: int
    scale: float
    window: int | None
    softcap: float | None
    halves: Halves


def attend_to_pages(kind, start_ref, table_ref, query, fresh, first, pool_in, out, pool, *scratch):
    """The kernel of a chain's rows; refs as in `_attend_tile`, ``pool`` also as ``pool_in``."""
    _attend_tile(kind, None, None, start_ref, table_ref, query, fresh, first, out, pool, *scratch)


def attend_to_pages_by_choice(
    kind, start_ref, table_ref, marks, own, query, fresh, first, pool_in, out, pool, *scratch
):
    """The kernel of a chain's rows that see chosen positions alone; further refs as in `Choice`."""
    *scratch, ahead = scratch
    choice = Choice(marks, own, ahead)
    _attend_tile(kind, None, choice, start_ref, table_ref, query, fresh, first, out, pool, *scratch)


def attend_to_pages_by_tree(
    kind, start_ref, table_ref, depth, keys, query, fresh, first, pool, out, *scratch
):
    """The kernel of a tree's rows; further refs as in `TreeRows`."""
    tree = TreeRows(depth, keys)
    _attend_tile(kind, tree, None, start_ref, table_ref, query, fresh, first, out, pool, *scratch)


class TreeRows(NamedTuple):
    """Refs of a tile of a tree's rows, and of all keys in ``staged``.

    ``depth`` [1, 1, heads * rows, 1]: distance of each query row from the anchor; ``keys`` [1, 2, staged]:
    the end of the rows that see a key (all see an old one), and the key's position.
    """

    depth: Any
    keys: Any

    def sees(self, row, other):
        """The mask of query rows [rows, 1] and staged keys [1, staged], of row ``other`` (old: < 0)."""
        return (other <= row) & (row < self.keys[0, 0:1])


class Choice(NamedTuple):
    """Refs of marks, 1 where a row sees a position and else 0.

    ``marks`` [B, tiles, blocks, rows, keys] in HBM, of all pages; ``own`` [1, 1, rows, staged]; on the chip
    ``ahead`` [2, rows, keys], fetched with the block of pages.
    """

    marks: Any
    own: Any
    ahead: Any

    def sees(self, row, marks):
        """The mask [heads * rows, keys] of query rows that are ``row`` [heads * rows, 1] of ``marks``.

        Rows of a head may be no whole registers, so that only a product repeats them cheaply.
        """
        place = jax.lax.broadcasted_iota(jnp.int32, (row.shape[0], marks.shape[0]), 1)
        return product((row == place).astype(marks.dtype), marks, 0) > 0.5


def _attend_tile(
    kind, tree, choice, start_ref, table_ref, query, fresh, first, out, pool,
    staged, blocks, top, total, sums, arrived, left,
):  # fmt: skip
    """One half, one sequence, one tile of query rows.

    Refs: ``query`` [1, own, 1, heads * rows, D]; ``fresh`` [1, own, M, KV]; ``first`` [own, heads * rows, 1],
    the sinks; ``pool`` [P, G, page, KV] in HBM; on the chip ``staged`` [own, rows to a tile, KV], ``blocks``
    [2, pages, own, page, KV], the softmax's ``top``, ``total`` and ``sums`` per row. ``tree``: `TreeRows`,
    None where each row follows the last. ``choice``: `Choice`, None where rows see all before them.
    """
    half, b, tile = (pl.program_id(axis) for axis in range(3))
    b, place = kind.halves.place(half, b)
    own, (block_pages, page) = staged.shape[0], (blocks.shape[1], blocks.shape[3])
    heads, columns = pl.ds(place * own, own), div(table_ref.shape[0], kind.halves.batch)
    start = start_ref[b]
    inside = rem(start, TILE)
    base = start - inside  # rows below are read from pages, the rest from `staged`

    def number(column):
        return table_ref[b * columns + column]

    def tile_at(position):
        offset = pl.multiple_of(rem(position, page), TILE)
        return pool.at[number(div(position, page)), heads, pl.ds(offset, TILE)]

    take_in = partial(_take_in, kind, staged, fresh, inside, left)
    pl.when(kind.halves.writes(half, tile))(lambda: take_in(tile_at(base)))
    running = SoftmaxRefs(top, total, sums)
    running.begin(first[...])
    offset = start + tile * kind.tile_rows
    row = rem(jax.lax.broadcasted_iota(jnp.int32, (query.shape[3], 1), 0), kind.tile_rows)
    at = offset + row if tree is None else start + tree.depth[0, 0]
    attend = partial(_attend, kind, query, running, at)
    keys = block_pages * page

    def attend_block(slot, block):
        pl.when((block + 1) * keys > base)(lambda: _clear_from(base, blocks, slot, block))
        position = block * keys + jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1)
        seen = True if choice is None else choice.sees(row, choice.ahead[slot])
        for head in range(own):
            attend(head, blocks[slot, :, head].reshape(keys, -1), position, (position < base) & seen)

    def copies(block, slot):
        for index in range(block_pages):
            source = pool.at[number(block * block_pages + index), heads]
            yield pltpu.make_async_copy(source, blocks.at[slot, index], arrived.at[slot])
        if choice is not None:
            marks = choice.marks.at[b, tile, block]
            yield pltpu.make_async_copy(marks, choice.ahead.at[slot], arrived.at[slot])

    earliest = _earliest(kind, offset if tree is None else _nearest(start, offset))
    begin, end = kind.halves.blocks(half, div(earliest, keys), div(base + keys - 1, keys))
    _read_ahead(copies, attend_block, begin, end)

    def copy_out(act):
        if tree is None:  # which rows of a tree stay is not known yet
            copy = lambda index, rows: act(_out(rows, tile_at(base + index), left))  # noqa: E731
            pl.when(kind.halves.writes(half, tile))(lambda: _each_tile(kind, staged, inside, copy))

    copy_out(lambda copy: copy.start())
    place = jax.lax.broadcasted_iota(jnp.int32, (1, staged.shape[1]), 1)
    position = base + place if tree is None else tree.keys[0, 1:2]
    result = running.part if kind.halves.keys == 2 else running.result
    for head in range(own):

        @pl.when(kind.halves.has_new(half))
        def _(head=head):
            if tree is None:
                seen = True if choice is None else choice.sees(row, choice.own[0, 0])
                attend(head, staged[head], position, (position < start + kind.rows) & seen)
            else:
                own = tree.sees(tile * kind.tile_rows + row, place - inside)
                attend(head, staged[head], position, own)

        out[0, head, 0] = result(head).astype(out.dtype)

    copy_out(lambda copy: copy.wait())


def _take_in(kind, staged, fresh, inside, left, tile):
    """The pool's ``tile`` of the first row, and the new rows, in ``staged``."""
    old = pltpu.make_async_copy(tile, staged.at[:, pl.ds(0, TILE)], left)
    old.start()
    old.wait()
    _merge(kind, staged, fresh, inside)


def _clear_from(base, blocks, slot, block):
    """Zeros in the key block number ``block`` from position ``base`` on.

    Other rows' pages may lie there, and 0 * NaN is NaN.
    """
    _, pages, own, page, _ = blocks.shape
    keys = pages * page
    place = jax.lax.broadcasted_iota(jnp.int32, (pages, page, 1), 0) * page
    place = place + jax.lax.broadcasted_iota(jnp.int32, (pages, page, 1), 1)
    for head in range(own):
        blocks[slot, :, head] = jnp.where(block * keys + place < base, blocks[slot, :, head], 0)


def _earliest(kind, position):
    """The first position that a row at ``position`` sees."""
    return 0 if kind.window is None else jnp.maximum(position - kind.window + 1, 0)


def _nearest(start, offset):
    """The least position of a tile's rows of a tree: a later tile, too, may hold rows near the anchor.

    ``start``: the anchor's; ``offset``: where a chain's tile would begin.
    """
    return start


def _out(rows, page_rows, semaphore):
    return pltpu.make_async_copy(rows, page_rows, semaphore)


def _each_tile(kind, staged, inside, act):
    """``act(first row, rows)`` for every tile of ``staged`` that holds new rows."""

    def one(index, _):
        at = pl.multiple_of(index * TILE, TILE)
        act(at, staged.at[:, pl.ds(at, TILE)])

    jax.lax.fori_loop(0, div(inside + kind.rows + TILE - 1, TILE), one, None)


def _read_ahead(copies, attend_block, begin, end):
    """Attend to blocks ``begin .. end-1``; each is fetched while the previous one is used."""

    def start(block):
        for copy in copies(block, rem(block, 2)):
            copy.start()

    pl.when(begin < end)(lambda: start(begin))

    def over(block, _):
        pl.when(block + 1 < end)(lambda: start(block + 1))
        for copy in copies(block, rem(block, 2)):
            copy.wait()
        attend_block(rem(block, 2), block)

    jax.lax.fori_loop(begin, end, over, None)


def _merge(kind, staged, fresh, inside):
    """Put the new rows into ``staged`` from row ``inside`` on, between old rows and zeros."""
    behind = staged.shape[1] - kind.rows
    kept = jax.lax.broadcasted_iota(jnp.int32, (staged.shape[1], 1), 0) < inside
    for head in range(staged.shape[0]):
        # Not a product with ones and zeros: a NaN of one row would reach all rows.
        rows = jnp.pad(fresh[0, head].astype(jnp.float32), ((0, behind), (0, 0)))
        moved = pltpu.roll(rows, inside, 0).astype(staged.dtype)
        staged[head] = jnp.where(kept, staged[head], moved)


def _attend(kind, query, running, at, head, rows, position, real):
    """Add ``rows`` [keys, KV] at ``position`` [1, keys] to the running softmax of one K/V head."""
    cut = kind.k_dim if query.shape[4] == kind.k_dim else 0
    key, value = (rows[:, :cut], rows[:, cut:]) if cut else (rows, rows[:, : running.sums.shape[2]])
    seen = real & (position <= at)
    if kind.window is not None:
        seen = seen & (position > at - kind.window)
    running.add(head, query[0, head, 0], key, value, seen, kind.scale, kind.softcap)
