"""Would scanning a target's layers compile faster for TPU, and at which cost in bytes?

A stack of Qwen3-4B's layers in plain JAX, without weights: M rows through all layers on a static cache,
unrolled, as a `lax.scan` over stacked weights with the caches as its inputs and outputs, and as one that
carries the stacked caches. Needs libtpu, no TPU.
"""

from __future__ import annotations

import argparse
import time
from functools import partial

from jax_bridge.offline import compile_only

compile_only()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
from jax.sharding import SingleDeviceSharding  # noqa: E402

from jax_bridge.aot import find_topology  # noqa: E402
from jax_bridge.hlo import Program  # noqa: E402
from jax_bridge.traffic import hbm_traffic  # noqa: E402
from torch_dflash.cli.provenance import write_json  # noqa: E402

HIDDEN, INNER, HEADS, GROUPS, DIM, SLOTS = 2560, 9728, 32, 8, 128, 4096
WEIGHTS = {
    "q": (HEADS * DIM, HIDDEN),
    "k": (GROUPS * DIM, HIDDEN),
    "v": (GROUPS * DIM, HIDDEN),
    "o": (HIDDEN, HEADS * DIM),
    "gate": (INNER, HIDDEN),
    "up": (INNER, HIDDEN),
    "down": (HIDDEN, INNER),
    "norms": (2, HIDDEN),
}
CACHE = (GROUPS, SLOTS, DIM)


def norm(rows, weight):
    """Root-mean-square norm."""
    wide = rows.astype(jnp.float32)
    return (wide * jax.lax.rsqrt(jnp.mean(wide**2, -1, keepdims=True) + 1e-6)).astype(rows.dtype) * weight


def attend(weights, rows, key, value, start):
    """Grouped attention of ``rows`` [M, H], which stand at ``start`` of the cache already."""
    count = rows.shape[0]
    query = (rows @ weights["q"].T).reshape(count, GROUPS, -1, DIM).transpose(1, 2, 0, 3)
    score = jnp.einsum("ghmd,gsd->ghms", query, key) * DIM**-0.5
    seen = jnp.arange(SLOTS) <= start + jnp.arange(count)[:, None]
    share = jax.nn.softmax(jnp.where(seen, score, -1e30).astype(jnp.float32), -1).astype(rows.dtype)
    out = jnp.einsum("ghms,gsd->mghd", share, value)
    return out.reshape(count, -1) @ weights["o"].T


def layer(weights, rows, caches, start, write, read):
    """One block; ``write`` puts [G, M, D] rows into a cache and ``read`` gives the layer's [G, S, D]."""
    normed = norm(rows, weights["norms"][0])
    fresh = [(normed @ weights[name].T).reshape(-1, GROUPS, DIM).transpose(1, 0, 2) for name in "kv"]
    caches = tuple(write(cache, new) for cache, new in zip(caches, fresh, strict=True))
    rows = rows + attend(weights, normed, *map(read, caches), start)
    normed = norm(rows, weights["norms"][1])
    inner = jax.nn.silu(normed @ weights["gate"].T) * (normed @ weights["up"].T)
    return rows + inner @ weights["down"].T, caches


def own(start):
    """Write and read of a cache of one layer."""
    return partial(jax.lax.dynamic_update_slice, start_indices=(0, start, 0)), lambda cache: cache


def unrolled(weights, rows, caches, start):
    """A Python loop over lists of layers."""
    done = []
    for one, cache in zip(weights, caches, strict=True):
        rows, cache = layer(one, rows, cache, start, *own(start))
        done.append(cache)
    return rows, done


def scanned(weights, rows, caches, start):
    """`lax.scan`: the stacked caches go in as inputs and come out as outputs."""
    return jax.lax.scan(
        lambda rows, xs: layer(xs[0], rows, xs[1], start, *own(start)), rows, (weights, caches)
    )


def carried(weights, rows, caches, start):
    """`lax.scan`: the stacked caches are carried, and each step updates its layer in place."""

    def step(carry, xs):
        rows, caches = carry
        one, index = xs

        def write(stack, new):
            return jax.lax.dynamic_update_slice(stack, new[None], (index, 0, start, 0))

        def read(stack):
            return jax.lax.dynamic_index_in_dim(stack, index, keepdims=False)

        return layer(one, rows, caches, start, write, read), None

    depth = weights["q"].shape[0]
    return jax.lax.scan(step, (rows, caches), (weights, jnp.arange(depth)))[0]


def measure(step, layers: int, rows: int, device) -> dict:
    """Compile ``step`` and read off what it costs."""

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=SingleDeviceSharding(device))

    def stack(*dims):
        return shape(layers, *dims)

    kind = shape if step is unrolled else stack
    weights = {name: kind(*dims) for name, dims in WEIGHTS.items()}
    caches = (kind(*CACHE), kind(*CACHE))
    if step is unrolled:
        weights, caches = [weights] * layers, [caches] * layers
    args = weights, shape(rows, HIDDEN), caches, shape(dtype=jnp.int32)
    lowered = jax.jit(step, donate_argnums=2).lower(*args)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - started, compiled.memory_analysis()
    floor = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves((weights, caches)))
    moved = hbm_traffic(Program(compiled.as_text()))
    return {
        "compile_seconds": round(seconds, 1),
        "hbm_bytes": moved,
        "floor_bytes": floor,
        "ratio": round(moved / floor, 3),
        "peak_temp_bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    """Compile the three forms and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    device = find_topology(asked.topology).devices[0]
    forms = {}
    for step in (unrolled, scanned, carried):
        forms[step.__name__] = measure(step, asked.layers, asked.rows, device)
        print(step.__name__, forms[step.__name__], flush=True)
    if asked.json:
        shape = {"layers": asked.layers, "rows": asked.rows, "topology": asked.topology}
        write_json(asked.json, shape | {"forms": forms})


if __name__ == "__main__":
    main()
