"""The call of the paged kernel: shapes, blocks and memory. Its body is `pallas_body`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Bool, Float, Int

from jax_bridge.kernels.halves import Halves
from jax_bridge.kernels.online_softmax import LOWEST, VMEM, joined
from jax_bridge.kernels.pallas_body import (
    Kind,
    attend_to_pages,
    attend_to_pages_by_choice,
    attend_to_pages_by_tree,
)
from torch_dflash.ops.paged_attention import LANES
from torch_dflash.plan import TILE


def pallas_paged_attention(
    query: Float[Array, "B G heads M D"],
    fresh: Float[Array, "B G M KV"],
    pool: Float[Array, "P G page_size KV"],
    table: Int[Array, "B row_pages"],
    start: Int[Array, " B"],
    sinks: Float[Array, "G heads"] | None = None,
    tree: Any = None,
    chosen: Bool[Array, "B M S"] | None = None,
    *,
    k_dim: int,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    block_keys: int = 512,
    row_tile: int = 2048,
    shared: int = 0,
    interpret: bool | pltpu.InterpretParams = False,
) -> tuple[Float[Array, "B G heads M Dv"], Float[Array, "P G page_size KV"]]:
    """Write ``fresh`` at positions ``start .. start+M-1`` of each sequence, and attend to all up to each row.

    Rows of a tree are not written: each attends to the pages' rows and to its own path.

    Args:
        query: rotated queries of D = ``k_dim``.
        fresh: K and V of the new rows side by side, padded to KV lanes.
        pool: pages of all sequences, consumed; position p is ``pool[table[b, p // page], :, p % page]``.
        table: page numbers, enough for ``start + M`` and a tile; no sequence owns page 0.
        start: positions already in the pages.
        sinks: one learned logit per query head.
        tree: `torch_dflash.ops.trees.Tree` of arrays, of the M rows; None: each row follows the last.
        chosen: the positions that each row of a chain sees, of those up to itself; None: all.
        block_keys: keys read at once.
        row_tile: most query rows (heads x M) of one program.
        shared: lanes of a value that lies in its key's first lanes (latents); 0: it lies behind the key.
        interpret: run on the CPU, slowly, for tests.
    """
    batch, groups, heads, rows, _ = query.shape
    halves = Halves.of(batch, groups)
    # Halves of the keys have results of at least twice the size.
    tile_rows = _divisor(rows, max(1, row_tile // halves.keys // heads))
    tiles = rows // tile_rows
    kind = Kind(0 if shared else k_dim, rows, tile_rows, scale, window, softcap, halves)

    # Where K ends inside a tile of lanes, zeros over V's lanes are cheaper than moving lanes.
    whole = shared > 0 or k_dim % LANES != 0
    lanes = pool.shape[3]
    query = jnp.pad(query, [(0, 0)] * 4 + [(0, lanes - k_dim)]) if whole else query
    width = -(-shared // LANES) * LANES or (lanes if whole else lanes - k_dim)
    tiled = _swap(query, (batch, groups, heads, tiles, tile_rows, -1))
    tiled = tiled.reshape(batch, groups, tiles, heads * tile_rows, -1)

    block_pages = max(1, block_keys // pool.shape[2])
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)))
    sinks = jnp.full((groups, heads), LOWEST) if sinks is None else sinks
    first = jnp.repeat(sinks.astype(jnp.float32), tile_rows, axis=1)[:, :, None]

    keys, more = table.shape[1] * pool.shape[2], ()
    if tree is not None:
        more = _tree_rows(tree, start, heads, tile_rows)
    elif chosen is not None:
        more = _marks(chosen, start, tile_rows, keys, block_pages * pool.shape[2])
    call = _call(kind, tiled, pool, width, block_pages, keys, interpret, more, tree is not None)
    out, *written = call(start, table.reshape(-1), *more, tiled, fresh, halves.begin(first), pool)
    pool = written[0] if written else pool
    out = joined(out, query.dtype) if halves.keys == 2 else out
    out = _swap(out, (batch, groups, tiles, heads, tile_rows, width)).reshape(*query.shape[:-1], width)
    if shared:
        return out[..., :shared], pool
    return (out[..., k_dim:] if whole else out), pool


def _staged_rows(rows: int) -> int:
    """Rows of the tiles for the last, partly filled tile and ``rows`` new rows."""
    return -(-(rows + TILE - 1) // TILE) * TILE


def _tree_rows(tree: Any, start: Array, heads: int, tile_rows: int) -> tuple[Array, Array]:
    """The arrays of `jax_bridge.kernels.pallas_body.TreeRows`, by sequence."""
    batch, rows = tree.depth.shape
    tiled = tree.depth.reshape(batch, rows // tile_rows, 1, tile_rows)
    depth = jnp.broadcast_to(tiled, (batch, rows // tile_rows, heads, tile_rows))
    place = jnp.arange(_staged_rows(rows), dtype=jnp.int32)
    inside = (start % TILE)[:, None]
    row = place - inside
    # A sum over the rows of each staged key: a gather is slow there.
    own = row[:, :, None] == jnp.arange(rows, dtype=jnp.int32)
    end, behind = (jnp.where(own, of[:, None], 0).sum(axis=-1) for of in (tree.end, tree.depth))
    end = jnp.where(row < 0, rows, end)
    position = start[:, None] + jnp.where(row < 0, row, behind)
    return depth.reshape(batch, rows // tile_rows, -1, 1), jnp.stack([end, position], axis=1)


def _marks(chosen: Array, start: Array, tile_rows: int, slots: int, keys: int) -> tuple[Array, Array]:
    """The arrays of `jax_bridge.kernels.pallas_body.Choice`: 0 and 1 in whole tiles, exact in bfloat16.

    A row past all slots sees what is behind them, so that it sees something.
    """
    batch, rows, known = chosen.shape
    staged, tiles = _staged_rows(rows), rows // tile_rows
    padding = [(0, 0)] * 2 + [(0, slots + staged - known)]
    marks = jnp.pad(chosen, padding, constant_values=True).astype(jnp.bfloat16)
    base = start - start % TILE
    own = jax.vmap(partial(jax.lax.dynamic_slice_in_dim, slice_size=staged, axis=1))(marks, base)
    own = own.reshape(batch, tiles, tile_rows, staged)
    held = marks[..., :slots].reshape(batch, tiles, tile_rows, -1, keys).swapaxes(2, 3)

    def whole(marks: Array) -> Array:
        return jnp.pad(marks, [(0, 0)] * (marks.ndim - 2) + [(0, -tile_rows % TILE), (0, 0)])

    return whole(held), whole(own)


def _further(halves: Halves, more: tuple[Array, ...], by_tree: bool, staged: int) -> tuple[Any, list, list]:
    """The kernel, and the blocks and further memory of the arrays ``more`` of a tree or a choice."""

    def of_sequence(half, b, tile, *_):
        return halves.place(half, b)[0], 0, 0

    def of_tile(half, b, tile, *_):
        return halves.place(half, b)[0], tile, 0, 0

    if by_tree:
        depth = pl.BlockSpec((1, 1, more[0].shape[2], 1), of_tile)
        return attend_to_pages_by_tree, [depth, pl.BlockSpec((1, 2, staged), of_sequence)], []
    if not more:
        return attend_to_pages, [], []
    marks = more[0]
    specs = [pl.BlockSpec(memory_space=pl.ANY), pl.BlockSpec((1, 1, marks.shape[3], staged), of_tile)]
    return attend_to_pages_by_choice, specs, [pltpu.VMEM((2, *marks.shape[3:]), marks.dtype)]


def _call(
    kind: Kind,
    query: Array,
    pool: Array,
    width: int,
    block_pages: int,
    keys: int,
    interpret: Any,
    more: tuple[Array, ...],
    by_tree: bool,
) -> Callable:
    """``(start, table, *more, query, fresh, sinks, pool) -> (out, pool)``, the pool in place.

    ``more``: of a choice, or ``by_tree``: the result is then ``(out,)``, for nothing is written.
    """
    batch, groups, tiles, height, depth = query.shape
    page, lanes = pool.shape[2:]
    halves, own = kind.halves, kind.halves.own
    staged = _staged_rows(kind.rows)
    made = jax.ShapeDtypeStruct((*query.shape[:-1], width), query.dtype)
    if halves.keys == 2:
        made = jax.ShapeDtypeStruct((batch, 2 * groups, tiles, height, LANES + width), jnp.float32)

    def by_tile(width: int, place: Callable) -> pl.BlockSpec:
        return pl.BlockSpec(
            (1, own, 1, height, width), lambda half, b, tile, *_: (*place(half, b), tile, 0, 0)
        )

    in_hbm = pl.BlockSpec(memory_space=pl.ANY)
    body, specs, ahead = _further(halves, more, by_tree, staged)
    written = [] if by_tree else [(pltpu.HBM(pool.shape, pool.dtype), in_hbm)]
    return pl.pallas_call(
        partial(body, kind),
        grid_spec=pltpu.PrefetchScalarGridSpec(
            num_scalar_prefetch=2,
            grid=(*halves.grid, tiles),
            in_specs=[
                *specs,
                by_tile(depth, halves.place),
                pl.BlockSpec(
                    (1, own, kind.rows, lanes), lambda half, b, tile, *_: (*halves.place(half, b), 0, 0)
                ),
                pl.BlockSpec((own, height, 1), lambda half, b, tile, *_: (halves.result(half, b)[1], 0, 0)),
                in_hbm,
            ],
            out_specs=[by_tile(made.shape[-1], halves.result), *(spec for _, spec in written)],
            scratch_shapes=[
                pltpu.VMEM((own, staged, lanes), pool.dtype),
                pltpu.VMEM((2, block_pages, own, page, lanes), pool.dtype),
                *(pltpu.VMEM((own, height, size), jnp.float32) for size in (LANES, LANES, width)),
                pltpu.SemaphoreType.DMA((2,)),
                pltpu.SemaphoreType.DMA,
                *ahead,
            ],
        ),
        out_shape=[made, *(shape for shape, _ in written)],
        input_output_aliases={} if by_tree else {5 + len(more): 1},
        # No half reads the other's writes: each core of a chip with two runs one.
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        # For full pages.
        cost_estimate=pl.CostEstimate(
            flops=2 * query.size // depth * keys * (depth + width),
            transcendentals=query.size // depth * keys,
            bytes_accessed=batch * groups * keys * lanes * pool.dtype.itemsize
            + 2 * query.size * query.dtype.itemsize,
        ),
        interpret=interpret,
        name="paged_attention",
    )


def _swap(rows: Array, shape: tuple[int, ...]) -> Array:
    """Reorders rows to tiles and back: a program has a tile of rows of every head."""
    return rows.reshape(shape).transpose(0, 1, 3, 2, 4, 5)


def _divisor(count: int, most: int) -> int:
    return next(size for size in range(min(count, most), 0, -1) if count % size == 0)
