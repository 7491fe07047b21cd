"""Paged attention in JAX: by platform, the Pallas kernel or a loop over blocks of pages in plain jnp."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from jax_bridge.kernels.pallas_paged import pallas_paged_attention
from jax_bridge.kernels.streamed import Block, SoftmaxState, fitting_keys, stream, with_rows
from torch_dflash.plan import TILE

BLOCK_KEYS = 512


def paged_attention_jax(
    inputs: Any, pages: Any
) -> tuple[Float[Array, "B M Q Dv"], Float[Array, "P G page_size KV"]]:
    """`torch_dflash.ops.paged_attention` of arrays; the pool is to be donated.

    Of chosen positions, the kernel alone: no loop reads a choice.
    """
    pool, (query, key, value, start), sinks = pages[0], inputs[:4], inputs.sinks
    shared, first = inputs.shared, 0 if inputs.shared else query.shape[3]
    batch, heads, rows, k_dim = query.shape
    groups, v_dim = value.shape[1], value.shape[3]
    fresh, table = _padded(*((value, key) if shared else (key, value)), pages)
    grouped = query.reshape(batch, groups, heads // groups, rows, k_dim)
    sinks = None if sinks is None else sinks.reshape(groups, -1)
    static = {"k_dim": k_dim, "scale": inputs.scale, "window": inputs.window, "softcap": inputs.softcap}
    static |= {"block_keys": BLOCK_KEYS, "shared": v_dim if shared else 0}
    if inputs.tree is not None:

        def kernel(*arrays: Any) -> Array:
            return pallas_paged_attention(*arrays, **static)[0][..., :v_dim]

        def other(grouped, fresh, pool, table, start, sinks, tree) -> Array:
            key, value = fresh[..., :k_dim], fresh[..., first : first + v_dim]
            arrays = {"query": grouped, "key": key, "value": value, "start": start}
            own = inputs._replace(**arrays, sinks=sinks, tree=tree)
            return jnp_tree_attention(grouped, own, (pool, table))

        arrays = grouped, fresh, pool, table, start, sinks, inputs.tree
        out = jax.lax.platform_dependent(*arrays, tpu=kernel, default=other)
        return _rows_first(out, query), pool
    if inputs.chosen is not None:
        chosen = inputs.chosen[:, 0]
        out, pool = pallas_paged_attention(grouped, fresh, pool, table, start, sinks, None, chosen, **static)
        return _rows_first(out[..., :v_dim], query), pool
    out, pool = jax.lax.platform_dependent(
        grouped,
        fresh,
        pool,
        table,
        start,
        sinks,
        tpu=partial(pallas_paged_attention, **static),
        default=partial(jnp_paged_attention, **static),
    )
    return _rows_first(out[..., :v_dim], query), pool


def append_pages_jax(key: Array, value: Array, start: Array, pages: Any) -> Float[Array, "P G page_size KV"]:
    """`torch_dflash.ops.paged_attention.append_pages`: reads, changes and writes whole tiles."""
    return _write(pages[0], *_padded(key, value, pages), start)


def _padded(key: Array, value: Array, pages: Any) -> tuple[Array, Array]:
    """New rows [B, G, M, KV], padded to the pool's lanes, and the table with columns for their tiles."""
    pool, table = pages
    fresh = jnp.concatenate([key, value], axis=-1).astype(pool.dtype)
    fresh = jnp.pad(fresh, ((0, 0), (0, 0), (0, 0), (0, pool.shape[3] - fresh.shape[3])))
    # Columns of page 0 past the last: padded rows of a bucket may exceed a row's capacity.
    return fresh, jnp.pad(table, ((0, 0), (0, -(-(key.shape[2] + TILE) // pool.shape[2]))))


def jnp_tree_attention(
    query: Float[Array, "B G heads M D"], inputs: Any, pages: Any
) -> Float[Array, "B G heads M Dv"]:
    """Attention of a tree's rows, with whole keys, to pages without them, and to their own paths."""
    (pool, table), start, window, tree = pages, inputs.start, inputs.window, inputs.tree
    k_dim, v_dim, page, rows = inputs.key.shape[3], inputs.value.shape[3], pool.shape[2], query.shape[3]
    lane = 0 if inputs.shared else k_dim
    block_pages = max(1, min(BLOCK_KEYS, fitting_keys(query, v_dim)) // page)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)))
    at = (start[:, None] + tree.depth)[:, :, None]

    def read(number: Any) -> Block:
        numbers = jax.lax.dynamic_slice_in_dim(table, number * block_pages, block_pages, axis=1)
        kv = pool[numbers].transpose(0, 2, 1, 3, 4).reshape(*query.shape[:2], -1, pool.shape[3])
        position = number * block_pages * page + jnp.arange(kv.shape[2], dtype=start.dtype)
        held = position < start[:, None]
        kv = jnp.where(held[:, None, :, None], kv, 0)
        seen = jnp.broadcast_to(held[:, None], (*at.shape[:2], kv.shape[2]))
        seen = seen if window is None else seen & (position > at - window)
        return with_rows(Block(kv[..., :k_dim], kv[..., lane : lane + v_dim], seen), position, inputs)

    sinks = None if inputs.sinks is None else inputs.sinks.reshape(query.shape[1], -1)
    rule, running = (inputs.scale, inputs.softcap), SoftmaxState.begin(query, v_dim, sinks)
    first = 0 if window is None else jnp.maximum(jnp.min(start) - window + 1, 0) // (block_pages * page)
    blocks = -(-(jnp.max(start) + rows) // (block_pages * page))
    return stream(running, query, read, first, blocks, *rule).result().astype(query.dtype)


def _rows_first(out: Array, query: Array) -> Float[Array, "B M Q Dv"]:
    batch, heads, rows = query.shape[:3]
    return out.reshape(batch, heads, rows, -1).transpose(0, 2, 1, 3)


def jnp_paged_attention(
    query: Float[Array, "B G heads M D"],
    fresh: Float[Array, "B G M KV"],
    pool: Float[Array, "P G page_size KV"],
    table: Int[Array, "B row_pages"],
    start: Int[Array, " B"],
    sinks: Float[Array, "G heads"] | None = None,
    *,
    k_dim: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    block_keys: int,
    shared: int = 0,
) -> tuple[Float[Array, "B G heads M Dv"], Float[Array, "P G page_size KV"]]:
    """`pallas_paged_attention`, block by block with a running softmax.

    It reads only blocks below the longest row's length, and only one block's scores exist at a time.
    """
    rows, page = fresh.shape[2], pool.shape[2]
    values = slice(0, shared) if shared else slice(k_dim, pool.shape[3])
    v_dim = values.stop - values.start
    pool = _write(pool, fresh, table, start)
    keys = min(block_keys, fitting_keys(query, v_dim))
    block_pages = max(1, keys // page)
    table = jnp.pad(table, ((0, 0), (0, -table.shape[1] % block_pages)))
    at = start[:, None] + jnp.arange(rows, dtype=start.dtype)

    def read(number: Any) -> Block:
        numbers = jax.lax.dynamic_slice_in_dim(table, number * block_pages, block_pages, axis=1)
        pages = pool[numbers]  # [B, pages, G, page, KV]
        kv = pages.transpose(0, 2, 1, 3, 4).reshape(*query.shape[:2], -1, pool.shape[3])
        position = number * block_pages * page + jnp.arange(kv.shape[2], dtype=start.dtype)
        # Other rows' pages lie behind a row's end, and 0 * NaN is NaN.
        kv = jnp.where((position < start[:, None] + rows)[:, None, :, None], kv, 0)
        seen = position <= at[:, :, None]
        if window is not None:
            seen = seen & (position > at[:, :, None] - window)
        return Block(kv[..., :k_dim], kv[..., values], seen)

    blocks = (jnp.max(start) + rows + block_pages * page - 1) // (block_pages * page)
    running = SoftmaxState.begin(query, v_dim, sinks)
    return stream(running, query, read, 0, blocks, scale, softcap).result().astype(query.dtype), pool


def _write(pool: Array, fresh: Array, table: Array, start: Array) -> Array:
    """Writes the new rows into the pages, a tile at a time: rows of a tile never cross pages."""
    batch, groups, rows, lanes = fresh.shape
    page, count = pool.shape[2], -(-(rows + TILE - 1) // TILE)
    inside = start % TILE
    base = start - inside

    def where(b, position):
        zero = jnp.int32(0)
        return table[b, position // page], zero, position % page, zero

    def write_row(b, pool):
        old = jax.lax.dynamic_slice(pool, where(b, base[b]), (1, groups, TILE, lanes))
        staged = jnp.pad(old[0], ((0, 0), (0, (count - 1) * TILE), (0, 0)))
        staged = jax.lax.dynamic_update_slice(staged, fresh[b], (0, inside[b], 0))
        for tile in range(count):
            piece = jax.lax.slice_in_dim(staged, tile * TILE, (tile + 1) * TILE, axis=1)
            pool = jax.lax.dynamic_update_slice(pool, piece[None], where(b, base[b] + tile * TILE))
        return pool

    return jax.lax.fori_loop(0, batch, write_row, pool)
