"""Compares compilation times and bytes of a target's layers for TPU, scanned and unrolled.

    PYTHONPATH=.venv/libtpu python benchmarks/scan_aot.py --json docs/results/scan_aot.json

Compiles the forms of `scan_layers` at Qwen3-4B's dimensions, without weights, which are [out, in] as torch
keeps them. Needs libtpu, no TPU.
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
from scan_layers import (  # noqa: E402
    Sizes,
    arguments,
    carried,
    paged_flat,
    paged_sliced,
    paged_unrolled,
    scanned,
    unrolled,
)

from jax_bridge.aot.compile import find_topology  # noqa: E402
from jax_bridge.aot.hlo import Program  # noqa: E402
from jax_bridge.aot.traffic import hbm_traffic  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402

FORMS = (unrolled, scanned, carried, paged_unrolled, paged_sliced, paged_flat)


def measure(form, sizes: Sizes, device) -> dict:
    """Compile ``form`` and read off its costs."""

    def shape(*dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=SingleDeviceSharding(device))

    weights, rows, caches = arguments(sizes, form, shape)
    places = shape(dtype=jnp.int32), shape(1, sizes.columns, dtype=jnp.int32)
    lowered = jax.jit(partial(form, sizes), donate_argnums=2).lower(weights, rows, caches, *places)
    started = time.perf_counter()
    compiled = lowered.compile()
    seconds, memory = time.perf_counter() - started, compiled.memory_analysis()
    kept, floor = (
        sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))
        for tree in (caches, (weights, caches))
    )
    moved = hbm_traffic(Program(compiled.as_text()))
    if form is paged_flat:
        # Counted as if each layer's kernel read the whole pool; its table names one layer's pages.
        moved -= (sizes.layers - 1) * kept
    return {
        "compile_seconds": round(seconds, 1),
        "hbm_bytes": moved,
        "floor_bytes": floor,
        "ratio": round(moved / floor, 3),
        "peak_temp_bytes": memory.temp_size_in_bytes,
    }


def main() -> None:
    """Compile the forms and print their figures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=36)
    parser.add_argument("--rows", type=int, default=16)
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    device = find_topology(asked.topology).devices[0]
    sizes = Sizes(2560, 9728, 32, 8, 128, 4096, asked.layers, asked.rows, transposed=False)
    forms = {}
    for form in FORMS:
        forms[form.__name__] = measure(form, sizes, device)
        print(form.__name__, forms[form.__name__], flush=True)
    if asked.json:
        shape = {"layers": asked.layers, "rows": asked.rows, "topology": asked.topology}
        write_results(asked.json, shape | {"forms": forms})


if __name__ == "__main__":
    main()
