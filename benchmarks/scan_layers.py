"""Layers of a target in plain JAX, unrolled and as `lax.scan`, on a static and on a paged cache.

Every form is ``(weights, rows [M, H], caches, start, table) -> (rows, caches)``. Unrolled ones take lists of
layers, the others stacks [L, ...]; caches are to be donated, and ``table`` is read by the paged forms alone.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_bridge.kernels.pallas_paged import pallas_paged_attention

PAGE = 64


class Sizes(NamedTuple):
    """Dimensions of the layers, positions of the cache, layers, new rows, and if weights are [in, out]."""

    hidden: int
    inner: int
    heads: int
    groups: int
    dim: int
    slots: int
    layers: int
    rows: int
    transposed: bool

    @property
    def weights(self) -> dict[str, tuple[int, ...]]:
        """Shapes of one layer's weights."""
        query, new = self.heads * self.dim, self.groups * self.dim
        linear = {
            "q": (query, self.hidden),
            "k": (new, self.hidden),
            "v": (new, self.hidden),
            "o": (self.hidden, query),
            "gate": (self.inner, self.hidden),
            "up": (self.inner, self.hidden),
            "down": (self.hidden, self.inner),
        }
        transpose = -1 if self.transposed else 1
        return {name: shape[::transpose] for name, shape in linear.items()} | {"norms": (2, self.hidden)}

    @property
    def columns(self) -> int:
        """Pages of a sequence."""
        return self.slots // PAGE + 1

    def caches(self, paged: bool) -> tuple[tuple[int, ...], ...]:
        """Shapes of one layer's caches: keys and values [G, S, D], or a pool [P, G, page, KV]."""
        if paged:
            return ((self.columns + 1, self.groups, PAGE, 2 * self.dim),)
        return ((self.groups, self.slots, self.dim),) * 2


def norm(rows, weight):
    """Root-mean-square norm."""
    wide = rows.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(rows.dtype) * weight


def layer(sizes: Sizes, weights, rows, caches, attend: Callable):
    """One block; ``attend(query [G, h, M, D], key [G, M, D], value, caches)`` also keeps the new rows."""

    def product(rows, name):
        return rows @ (weights[name] if sizes.transposed else weights[name].T)

    normed = norm(rows, weights["norms"][0])
    query, key, value = (
        product(normed, name).reshape(sizes.rows, -1, sizes.dim).transpose(1, 0, 2) for name in "qkv"
    )
    out, caches = attend(query.reshape(sizes.groups, -1, *query.shape[1:]), key, value, caches)
    rows = rows + product(out.transpose(2, 0, 1, 3).reshape(sizes.rows, -1), "o")
    normed = norm(rows, weights["norms"][1])
    inner = jax.nn.silu(product(normed, "gate")) * product(normed, "up")
    return rows + product(inner, "down"), caches


def dense(start, query, key, value):
    """Attention [G, h, M, D] over a static cache in which the new rows stand already."""
    rows, slots, dim = query.shape[2], *key.shape[1:]
    score = jnp.einsum("ghmd,gsd->ghms", query, key) * dim**-0.5
    seen = jnp.arange(slots) <= start + jnp.arange(rows)[:, None]
    share = jax.nn.softmax(jnp.where(seen, score, -1e30).astype(jnp.float32), -1).astype(query.dtype)
    return jnp.einsum("ghms,gsd->ghmd", share, value)


def paged(start, query, key, value, pool, table):
    """The library's kernel: (attention [G, h, M, D], the pool with the new rows)."""
    dim = query.shape[3]
    fresh = jnp.concatenate([key, value], axis=2)[None]
    out, pool = pallas_paged_attention(
        query[None], fresh, pool, table, start[None], k_dim=dim, scale=dim**-0.5
    )
    return out[0], pool


def _own(start, query, key, value, caches):
    """A static cache of one layer."""
    put = partial(jax.lax.dynamic_update_slice, start_indices=(0, start, 0))
    caches = tuple(put(cache, new) for cache, new in zip(caches, (key, value), strict=True))
    return dense(start, query, *caches), caches


def _own_pool(start, table, query, key, value, caches):
    """A pool of one layer."""
    out, pool = paged(start, query, key, value, caches[0], table)
    return out, (pool,)


def _in_list(sizes, weights, rows, caches, attend):
    done = []
    for one, cache in zip(weights, caches, strict=True):
        rows, cache = layer(sizes, one, rows, cache, attend)
        done.append(cache)
    return rows, done


def _carrying(sizes, weights, rows, caches, attend):
    """`lax.scan` that carries the caches; ``attend`` is also given the layer's number, last."""

    def step(carry, xs):
        one, index = xs
        return layer(sizes, one, *carry, lambda *rest: attend(*rest, index)), None

    return jax.lax.scan(step, (rows, caches), (weights, jnp.arange(sizes.layers)))[0]


def unrolled(sizes: Sizes, weights, rows, caches, start, table):
    """A Python loop over lists of layers with a static cache each."""
    return _in_list(sizes, weights, rows, caches, partial(_own, start))


def scanned(sizes: Sizes, weights, rows, caches, start, table):
    """`lax.scan`: the stacked static caches go in as inputs and come out as outputs."""
    attend = partial(_own, start)
    return jax.lax.scan(lambda rows, xs: layer(sizes, xs[0], rows, xs[1], attend), rows, (weights, caches))


def carried(sizes: Sizes, weights, rows, caches, start, table):
    """`lax.scan` that carries the stacked static caches; each step updates its layer in place."""

    def attend(query, key, value, stacks, index):
        put = partial(jax.lax.dynamic_update_slice, start_indices=(index, 0, start, 0))
        stacks = tuple(put(stack, new[None]) for stack, new in zip(stacks, (key, value), strict=True))
        own = (jax.lax.dynamic_index_in_dim(stack, index, keepdims=False) for stack in stacks)
        return dense(start, query, *own), stacks

    return _carrying(sizes, weights, rows, caches, attend)


def paged_unrolled(sizes: Sizes, weights, rows, caches, start, table):
    """A Python loop over lists of layers with a pool each."""
    return _in_list(sizes, weights, rows, caches, partial(_own_pool, start, table))


def paged_sliced(sizes: Sizes, weights, rows, caches, start, table):
    """`lax.scan` that carries stacked pools; the kernel is given its layer's, sliced out."""

    def attend(query, key, value, stacks, index):
        pool = jax.lax.dynamic_index_in_dim(stacks[0], index, keepdims=False)
        out, pool = paged(start, query, key, value, pool, table)
        return out, (jax.lax.dynamic_update_index_in_dim(stacks[0], pool, index, 0),)

    return _carrying(sizes, weights, rows, caches, attend)


def paged_flat(sizes: Sizes, weights, rows, caches, start, table):
    """`lax.scan` that carries one pool of all layers' pages; the table points at the layer's."""

    def attend(query, key, value, stacks, index):
        flat = stacks[0].reshape(-1, *stacks[0].shape[2:])
        out, flat = paged(start, query, key, value, flat, table + index * stacks[0].shape[1])
        return out, (flat.reshape(stacks[0].shape),)

    return _carrying(sizes, weights, rows, caches, attend)


LISTS = (unrolled, paged_unrolled)
"""The forms that take lists of layers."""


def arguments(sizes: Sizes, form: Callable, make: Callable[..., Any]) -> tuple:
    """(weights, rows, caches) for ``form``, of arrays that ``make(*shape)`` gives."""

    def layers(depth: tuple[int, ...]) -> tuple[dict, tuple]:
        weights = {name: make(*depth, *shape) for name, shape in sizes.weights.items()}
        caches = sizes.caches(form.__name__.startswith("paged"))
        return weights, tuple(make(*depth, *shape) for shape in caches)

    rows = make(sizes.rows, sizes.hidden)
    if form not in LISTS:
        weights, caches = layers((sizes.layers,))
        return weights, rows, caches
    weights, caches = zip(*(layers(()) for _ in range(sizes.layers)), strict=True)
    return list(weights), rows, list(caches)
