"""The matrix products of one pass of SmolLM2-135M's shapes on this CPU, by type, layout and rows.

    python benchmarks/cpu_products.py --json docs/results/cpu_products.json

Random weights given as arguments; norms and an activation between the products keep them in order. Forms take
turns; the fastest run of each is kept, for other work on the machine only slows. Printed with them: the speed
of reading memory, and so the least time of reading the weights once.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch

from torch_dflash.cli.outputs import write_results

HIDDEN, INNER, KV, VOCAB, LAYERS = 576, 1536, 192, 49_152, 30
ROWS = (1, 2, 4, 8, 16)
LAYOUTS = {"[out, in]": False, "[in, out]": True}
FUSED = "[out, in], q/k/v and gate/up as one"


def dot(rows: Any, weight: Any, turned: bool, kind: Any) -> jax.Array:
    """``rows`` times a weight [out, in], ``turned``: [in, out], summed in ``kind``."""
    dims = (((1,), (0 if turned else 1,)), ((), ()))
    return jax.lax.dot_general(rows, weight, dims, preferred_element_type=kind)


def doubled(rows: Any) -> jax.Array:
    """A single row twice: products of one row in narrow types are slow on some CPUs."""
    return jnp.concatenate([rows, rows]) if rows.shape[0] == 1 else rows


def in_float32(rows: Any, weight: Any, turned: bool) -> jax.Array:
    """Rows unchanged."""
    return dot(rows, weight, turned, jnp.float32)


def in_bfloat16(rows: Any, weight: Any, turned: bool) -> jax.Array:
    """Rows rounded to bfloat16, sums in float32."""
    return dot(doubled(rows).astype(jnp.bfloat16), weight, turned, jnp.float32)[: rows.shape[0]]


def in_int8(rows: Any, weight: Any, turned: bool) -> jax.Array:
    """Rows quantised on the fly, each by its largest entry; weights per output row."""
    integers, scale = weight
    wide = doubled(rows)
    own = jnp.maximum(jnp.abs(wide).max(axis=1, keepdims=True), 1e-9) / 127
    sums = dot(jnp.round(wide / own).astype(jnp.int8), integers, turned, jnp.int32)
    return (sums.astype(jnp.float32) * own * scale)[: rows.shape[0]]


FORMS: dict[str, Callable] = {"float32": in_float32, "bfloat16": in_bfloat16, "int8": in_int8}


def make_weights(form: str, turned: bool, fused: bool = False) -> Any:
    """Weights of every layer and of the head, as ``form`` takes them."""
    random = np.random.default_rng(0)

    def one(outer: int, inner: int) -> Any:
        weight = random.standard_normal((outer, inner), np.float32) * inner**-0.5
        if form == "int8":
            scale = np.abs(weight).max(axis=1) / 127
            weight = np.round(weight / scale[:, None]).astype(np.int8)
            return jnp.asarray(weight.T.copy() if turned else weight), jnp.asarray(scale)
        return jnp.asarray(weight.T.copy() if turned else weight, form)

    def several(*outers: int) -> list[Any]:
        return [one(outer, HIDDEN) for outer in ([sum(outers)] if fused else outers)]

    def layer() -> Any:
        return several(HIDDEN, KV, KV), one(HIDDEN, HIDDEN), several(INNER, INNER), one(HIDDEN, INNER)

    return [layer() for _ in range(LAYERS)], one(VOCAB, HIDDEN)


def split(products: list[jax.Array], *sizes: int) -> list[jax.Array]:
    """Splits products by weight, and also a product of all weights at once."""
    return products if len(products) > 1 else jnp.split(products[0], np.cumsum(sizes)[:-1], axis=1)


def one_pass(form: str, turned: bool) -> Callable:
    """``(weights, rows) -> token of each row``."""

    def norm(x: Any) -> Any:
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-5)

    def run(weights: Any, x: Any) -> jax.Array:
        times = lambda x, weight: FORMS[form](x, weight, turned)  # noqa: E731
        layers, head = weights
        for heads, out, gates, down in layers:
            h = norm(x)
            query, key, value = split([times(h, weight) for weight in heads], HIDDEN, KV, KV)
            x = x + times(query + jnp.tile(key * value, (1, 3)), out)
            h = norm(x)
            gate, up = split([times(h, weight) for weight in gates], INNER, INNER)
            x = x + times(jax.nn.silu(gate) * up, down)
        return times(norm(x), head).argmax(-1)

    return jax.jit(run)


def measure(repeats: int) -> list[dict]:
    """Milliseconds of one pass, by form, layout and rows."""
    programs = {}
    for form in FORMS:
        for layout, turned in (LAYOUTS | {FUSED: False}).items():
            weights = make_weights(form, turned, layout == FUSED)
            for rows in ROWS:
                x = jnp.asarray(np.random.default_rng(1).standard_normal((rows, HIDDEN), np.float32))
                programs[form, layout, rows] = one_pass(form, turned).lower(weights, x).compile(), weights, x
    times: dict[Any, list[float]] = {name: [] for name in programs}
    for repeat in range(repeats + 1):
        for name, (program, weights, x) in programs.items():
            started = time.perf_counter()
            program(weights, x).block_until_ready()
            if repeat:
                times[name].append((time.perf_counter() - started) * 1e3)
    return [
        {"form": form, "layout": layout, "rows": rows}
        | {"fastest_ms": round(min(ms), 2), "median_ms": round(statistics.median(ms), 2)}
        for (form, layout, rows), ms in times.items()
    ]


def read_speed() -> float:
    """GB/s at which this process reads half a gigabyte, with torch's threads; the best of eight."""
    array, times = torch.ones(128 << 20), []
    for _ in range(8):
        started = time.perf_counter()
        array.sum().item()
        times.append(time.perf_counter() - started)
    return round(array.nbytes / min(times) / 1e9, 1)


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=12)
    asked = parser.parse_args()
    found = {"read_gb_per_s": read_speed(), "products": measure(asked.repeats)}
    for one in found["products"]:
        print(*one.values(), sep="\t")
    print(f"memory is read at {found['read_gb_per_s']} GB/s")
    if asked.json:
        write_results(asked.json, found)


if __name__ == "__main__":
    main()
