"""Measures the faster product with a weight on this CPU, once, and keeps the answer on disk.

On some CPUs a float32 weight kept as [in, out] gains a third, on others it loses one
(`benchmarks/weight_layout.py`). The two round differently in the last bits: one process has one layout, two
machines may have two. CPUs without instructions for a narrow type may be faster in float32.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from math import prod
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from jax_bridge.compilations import keep_programs, uncounted
from jax_bridge.weights.formats import dot, dot_led
from torch_dflash.storage.files import StageError, write_json
from torch_dflash.storage.machine import fingerprint

FILE = "products.json"
SMALLEST = 1 << 18
"""Entries of the smallest weight that is measured; smaller ones are kept as [in, out]."""
MOST = 1 << 23
"""Entries that a measurement reads, more than a CPU's inner caches hold; of a larger weight, some rows."""
ROWS = (1, 8)
REPEATS = 4
GAIN = 0.95
"""Largest part of the usual product's time at which another one is chosen."""
NARROW = (1024, 1024)
"""Shape of the weights that measure a narrow type: the CPU's instructions decide, not the shape."""
LED = (2048, 2048)
"""Shape of the weights that measure 8 bits as first operand: larger ones gain more."""
LOSS = 1.2
"""A narrow weight is kept in float32, twice its bytes, where its products take longer by this factor."""


def lies_by_inputs(shape: tuple[int, ...]) -> bool:
    """Whether to keep a float32 weight [out, in] as [in, out]."""
    out, size = shape
    return out * size < SMALLEST or _kept(min(out, max(1, MOST // size)), size)


def is_slow(dtype: str, shape: tuple[int, ...]) -> bool:
    """Whether to multiply a weight [out, in] of a narrow type in float32, with equal results."""
    return prod(shape) >= SMALLEST and _slow(dtype)


def leads(shape: tuple[int, ...]) -> bool:
    """Whether to make a weight [out, in] of 8 bits the first operand; with AMX, plain steps gain by it."""
    return prod(shape) >= SMALLEST and _led()


@cache
def _kept(out: int, size: int) -> bool:
    # Under other load one measurement means little: the exception must be seen three times.
    return _once(f"[{out}, {size}]", lambda: any(_measure(out, size) for _ in range(3)))


@cache
def _slow(dtype: str) -> bool:
    return _once(f"{dtype} is slow", lambda: all(_measure_type(dtype) for _ in range(3)))


@cache
def _led() -> bool:
    return _once("int8 leads", lambda: sum(_measure_led() for _ in range(3)) >= 2)


def _once(name: str, measure: Callable[[], bool]) -> bool:
    """The answer of ``measure``, once for all processes on machines like this one."""
    machine, file = f"{fingerprint()}, jaxlib {jaxlib.__version__}", _file()
    known = _read(file)
    own = known.setdefault(machine, {})
    if not isinstance(own.get(name), bool):
        with uncounted(), jax.enable_x64(False):
            own[name] = measure()
        if file is not None:
            with suppress(OSError, StageError):  # the next process measures again
                write_json(file, known)
    return own[name]


def _file() -> Path | None:
    # Beside the compiled programs, if those are kept.
    keep_programs()
    config: Any = jax.config
    folder = config.jax_compilation_cache_dir
    return Path(folder) / FILE if folder and Path(folder).is_dir() else None


def _read(file: Path | None) -> dict[str, dict]:
    try:
        found = json.loads(file.read_text()) if file else {}
    except (OSError, ValueError, RecursionError):
        return {}
    whole = isinstance(found, dict) and all(isinstance(own, dict) for own in found.values())
    return found if whole else {}


def _measure(out: int, size: int) -> bool:
    """Times a plain step's and a round's product in both layouts, in turns."""
    count = max(1, MOST // (out * size))
    layouts = {"oi": (out, size), "io": (size, out)}
    weights = {name: [jnp.full(shape, 0.5) for _ in range(count)] for name, shape in layouts.items()}
    products = {name: jax.jit(partial(jnp.einsum, f"ri,{name}->ro")) for name in layouts}
    seconds = _race(size, products, weights)
    return seconds["oi"] > GAIN * seconds["io"]


def _measure_type(dtype: str) -> bool:
    """Times the products of a narrow type and of float32."""
    count = MOST // prod(NARROW)
    weights = {kind: [jnp.full(NARROW, 0.5, kind) for _ in range(count)] for kind in (dtype, "float32")}

    def product(rows: jax.Array, weight: jax.Array) -> jax.Array:
        return dot(rows.astype(weight.dtype), weight, jnp.float32)

    seconds = _race(NARROW[1], dict.fromkeys(weights, jax.jit(product)), weights)
    return seconds[dtype] > LOSS * seconds["float32"]


def _measure_led() -> bool:
    """Times the products of 8 bits with the rows first and with the weight first."""
    weights = [jnp.ones(LED, jnp.int8) for _ in range(MOST // prod(LED))]
    products = {
        of: jax.jit(lambda rows, weight, of=of: of(rows.astype(jnp.int8), weight, jnp.int32))
        for of in (dot, dot_led)
    }
    seconds = _race(LED[1], products, dict.fromkeys(products, weights))
    return seconds[dot_led] <= GAIN * seconds[dot]


def _race(size: int, products: dict[Any, Callable], weights: dict[Any, list[jax.Array]]) -> dict[Any, float]:
    """Seconds by name for rows of ``size`` entries."""
    seconds = dict.fromkeys(products, 0.0)
    for rows in (jnp.ones((number, size)) for number in ROWS):
        runs = {name: partial(_run, product, rows, weights[name]) for name, product in products.items()}
        for run in runs.values():
            run()  # compiles
        turns = [{name: run() for name, run in runs.items()} for _ in range(REPEATS)]
        seconds = {name: seconds[name] + min(turn[name] for turn in turns) for name in products}
    return seconds


def _run(product: Callable, rows: jax.Array, weights: list[jax.Array]) -> float:
    started = time.perf_counter()
    jax.block_until_ready([product(rows, weight) for weight in weights])
    return time.perf_counter() - started
