"""Draft keys and values in vLLM's pages: written behind each context, read by a block that is never written.

A page array is [pages, rows of a page, *row]; tpu-inference chooses the shape of ``row`` for its kernels. In
memory order a row holds the key and then the value of each head, each padded to ``width``.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

ROWS_AT_ONCE = 512
"""Context rows of each request per turn of the loop: they bound a pass's memory besides the pages."""
ROWS_WRITTEN = 16
"""Rows of a window that is written at once, of new rows and old."""


def as_rows(
    key: Float[Array, "R G D"], value: Float[Array, "R G D"], pages: Array, width: int
) -> Float[Array, "R *row"]:
    """Keys and values as rows of ``pages``."""
    pad = [(0, 0), (0, 0), (0, width - key.shape[-1])]
    both = jnp.concatenate([jnp.pad(key, pad), jnp.pad(value, pad)], axis=-1)
    shape = pages.shape[2:]
    if math.prod(both.shape[1:]) != math.prod(shape):  # tpu-inference aligns a row to whole words
        both = both.reshape(len(both), -1)
        both = jnp.pad(both, [(0, 0), (0, math.prod(shape) - both.shape[1])])
    return both.reshape(-1, *shape).astype(pages.dtype)


def write_rows(
    pages: dict[int, Array],
    new: Sequence[tuple[int, int, Array]],
    tables: dict[int, Int[Array, "S P"]],
    source: Int[Array, " S"],
    first: Int[Array, " S"],
    count: Int[Array, " S"],
) -> dict[int, Array]:
    """Page arrays with each sequence's new rows, in place if they are donated.

    Args:
        pages: arrays by index. new: (index of the array, group of the table, rows [R, *row]) of each layer.
        tables: pages of each sequence by group, in order.
        source: where in R a sequence's rows begin. first: the position of the first. count: their number.

    A loop over windows of whole rows. A scatter would cost a TPU two copies of each array: its compiler
    chooses another layout for the scatter than for everything else.
    """
    size = pages[new[0][0]].shape[1]
    window = math.gcd(size, ROWS_WRITTEN)
    pad = [(window, window)]
    padded = [jnp.pad(rows, pad + [(0, 0)] * (rows.ndim - 1)) for *_, rows in new]
    windows = jnp.where(count > 0, (first + count - 1) // window - first // window + 1, 0)
    ends = jnp.cumsum(windows)

    def turn(step: Array, pages: dict[int, Array]) -> dict[int, Array]:
        pages = dict(pages)
        owner = jnp.searchsorted(ends, step, side="right")
        at = (first[owner] // window + step - ends[owner] + windows[owner]) * window
        fresh = at + jnp.arange(window) - first[owner]
        fresh = (fresh >= 0) & (fresh < count[owner])
        for (index, group, _), rows in zip(new, padded, strict=True):
            page, zeros = tables[group][owner, at // size], (0,) * (rows.ndim - 1)
            own = jax.lax.dynamic_slice_in_dim(rows, source[owner] + at - first[owner] + window, window)
            place, part = (page, at % size, *zeros), (1, window, *rows.shape[1:])
            old = jax.lax.dynamic_slice(pages[index], place, part)
            kept = jnp.where(fresh.reshape(-1, *(1,) * len(zeros)), own[None], old)
            pages[index] = jax.lax.dynamic_update_slice(pages[index], kept, place)
        return pages

    return jax.lax.fori_loop(0, ends[-1], turn, pages)


def attend_in_turn(
    query: Array, key: Array, value: Array, pages: Array, table: Array, length: Array, **options: Any
) -> Float[Array, "B W Q D"]:
    """`attend_block` of one request after another: each reads its own context, and no row without one.

    Of several requests at once a TPU's compiler would gather from a copy of the pages in another layout.
    """
    if len(length) == 1:
        return attend_block(query, key, value, pages, table, length, **options)

    def attend(part: list[Array]) -> Array:
        query, key, value, table, length = (one[None] for one in part)
        return attend_block(query, key, value, pages, table, length, **options)[0]

    return jax.lax.map(attend, [query, key, value, table, length])


def attend_block(
    query: Float[Array, "B Q W D"],
    key: Float[Array, "B G W D"],
    value: Float[Array, "B G W D"],
    pages: Array,
    table: Int[Array, "B P"],
    length: Int[Array, " B"],
    *,
    scale: float,
    width: int,
    window: int | None = None,
    causal: bool = False,
    sinks: Float[Array, " Q"] | None = None,
) -> Float[Array, "B W Q D"]:
    """Attention of a block at positions ``length`` onwards to the context before it and to itself.

    Args:
        query, key, value: the block's own, rotated.
        pages: as `write_rows` fills them. table: the pages of each sequence, in order.
        length: rows of context. scale: factor on the scores. width: of a padded head.
        window: positions that a row sees on each side, its own included; None: all.
        causal: rows do not see later rows of the block.
        sinks: one learned logit per query head, without a value.

    A loop over pages reads the context up to the longest sequence, with a running softmax.
    """
    batch, heads, rows, dim = query.shape
    groups = key.shape[1]
    grouped = query.reshape(batch, groups, heads // groups, rows, dim)
    at = jnp.arange(rows)
    score = partial(jnp.einsum, "bghwd,bgld->bghwl", preferred_element_type=jnp.float32)
    mix = partial(jnp.einsum, "bghwl,bgld->bghwd", preferred_element_type=jnp.float32)
    own = jnp.where(_visible(at[:, None] - at, window, causal), score(grouped, key) * scale, -jnp.inf)
    top = own.max(-1)  # a row sees itself, so the maximum is finite
    if sinks is not None:
        sink = sinks.astype(jnp.float32).reshape(1, groups, -1, 1)
        top = jnp.maximum(top, sink)
    weight = jnp.exp(own - top[..., None])
    total = weight.sum(-1) + (0 if sinks is None else jnp.exp(sink - top))
    mixed = mix(weight.astype(value.dtype), value)

    size = pages.shape[1]
    each = max(1, ROWS_AT_ONCE // size)
    table = jnp.pad(table, [(0, 0), (0, -table.shape[1] % each)])

    def turn(step: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        top, total, mixed = carry
        these = jax.lax.dynamic_slice_in_dim(table, step * each, each, axis=1)
        past_key, past_value = _heads(pages[these], groups, width, dim)
        position = step * each * size + jnp.arange(each * size)
        gap = length[:, None, None] + at[:, None] - position
        seen = _visible(gap, window, causal) & (position < length[:, None])[:, None]
        past = jnp.where(seen[:, None, None], score(grouped, past_key.astype(query.dtype)) * scale, -jnp.inf)
        higher = jnp.maximum(top, past.max(-1))
        weight, shrunk = jnp.exp(past - higher[..., None]), jnp.exp(top - higher)
        new = mix(weight.astype(value.dtype), past_value.astype(value.dtype))
        return higher, total * shrunk + weight.sum(-1), mixed * shrunk[..., None] + new

    turns = -(-jnp.max(length) // (each * size))
    first = jnp.int32(0)
    if window is not None:
        shortest = jnp.min(length, where=length > 0, initial=jnp.iinfo(jnp.int32).max)
        first = jnp.maximum(shortest - window, 0) // (each * size)
    top, total, mixed = jax.lax.fori_loop(first, turns, turn, (top, total, mixed))
    out = (mixed / total[..., None]).astype(query.dtype)
    return out.reshape(batch, heads, rows, dim).transpose(0, 2, 1, 3)


def _visible(gap: Int[Array, "*S"], window: int | None, causal: bool) -> Bool[Array, "*S"]:
    """The mask by the distance of the key before the query (`torch_dflash.ops.attention`)."""
    seen = gap >= 0 if causal else jnp.ones(gap.shape, bool)
    if window is not None:
        seen = seen & (gap < window)
        seen = seen if causal else seen & (gap > -window)
    return seen


def _heads(rows: Array, groups: int, width: int, dim: int) -> tuple[Array, Array]:
    """Keys and values [B, G, L, D] of gathered pages [B, pages, rows of a page, *row]."""
    batch, count, size, *row = rows.shape
    if math.prod(row) != groups * 2 * width:
        rows = rows.reshape(batch, count * size, -1)[..., : groups * 2 * width]
    both = rows.reshape(batch, count * size, groups, 2, width)[..., :dim]
    return both[..., 0, :].transpose(0, 2, 1, 3), both[..., 1, :].transpose(0, 2, 1, 3)
