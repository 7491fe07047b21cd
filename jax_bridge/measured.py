"""Which way round a float32 weight is multiplied faster on this CPU: measured once, kept on disk.

On some CPUs a weight kept as [in, out] gains a third, on others it loses one (`benchmarks/weight_layout.py`).
The two round differently in the last bits: one process has one layout, two machines may have two.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache, partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import jaxlib

from jax_bridge.compile_cache import keep_programs
from torch_dflash.storage.files import StageError, write_json
from torch_dflash.storage.machine import fingerprint

FILE = "products.json"
SMALLEST = 1 << 18
"""Entries of the smallest weight that is measured; a smaller one is kept as [in, out]."""
MOST = 1 << 23
"""Entries that a measurement reads, which a CPU's inner caches do not hold: some rows of a larger weight."""
ROWS = (1, 8)
REPEATS = 4
GAIN = 0.95
"""A weight stays as torch keeps it where that takes at most this part of the time."""


def lies_by_inputs(shape: tuple[int, ...]) -> bool:
    """Whether a float32 weight [out, in] is to be kept as [in, out]."""
    out, size = shape
    return out * size < SMALLEST or _kept(min(out, max(1, MOST // size)), size)


@cache
def _kept(out: int, size: int) -> bool:
    """`_measure`, once for all processes on machines like this one."""
    name, machine = f"[{out}, {size}]", f"{fingerprint()}, jaxlib {jaxlib.__version__}"
    file = _file()
    known = _read(file)
    own = known.setdefault(machine, {})
    if not isinstance(own.get(name), bool):
        # Beside other work a measurement may say anything: the exception has to be seen three times.
        own[name] = any(_measure(out, size) for _ in range(3))
        if file is not None:
            with suppress(OSError, StageError):  # the next process measures again
                write_json(file, known)
    return own[name]


def _file() -> Path | None:
    """Where programs are kept too, if they are kept on this machine."""
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
    """Time a plain step's and a round's product in both layouts, in turns."""
    count = max(1, MOST // (out * size))
    layouts = {"oi": (out, size), "io": (size, out)}
    weights = {name: [jnp.full(shape, 0.5) for _ in range(count)] for name, shape in layouts.items()}
    products = {name: jax.jit(partial(jnp.einsum, f"ri,{name}->ro")) for name in layouts}
    seconds = dict.fromkeys(layouts, 0.0)
    for rows in (jnp.ones((number, size)) for number in ROWS):
        runs = {name: partial(_run, products[name], rows, weights[name]) for name in layouts}
        for run in runs.values():
            run()  # compiles
        turns = [{name: run() for name, run in runs.items()} for _ in range(REPEATS)]
        seconds = {name: seconds[name] + min(turn[name] for turn in turns) for name in layouts}
    return seconds["oi"] > GAIN * seconds["io"]


def _run(product: Callable, rows: jax.Array, weights: list[jax.Array]) -> float:
    """Seconds that the products with all weights take."""
    started = time.perf_counter()
    jax.block_until_ready([product(rows, weight) for weight in weights])
    return time.perf_counter() - started
