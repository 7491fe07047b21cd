"""Measures the run time of scanned layers: the unrolled and the carrying form of `scan_layers`, on this CPU.

    OMP_NUM_THREADS=1 python benchmarks/scan_cpu.py --json docs/results/scan_cpu.json

SmolLM2-135M's dimensions in float32, random weights [in, out] given as arguments, caches donated. Runs
alternate.
"""

from __future__ import annotations

import argparse
import time

import jax
import jax.numpy as jnp
import numpy as np
from scan_layers import Sizes, arguments, carried, unrolled
from weight_layout import alternate

from torch_dflash.cli.outputs import write_results


class Running:
    """One compiled form with its arrays; each call runs it once on the caches of the last."""

    def __init__(self, form, sizes: Sizes, start: int):
        random = np.random.default_rng(0)
        self.start, table = jnp.int32(start), jnp.zeros((1, sizes.columns), jnp.int32)

        def make(*shape):
            return jnp.asarray(random.standard_normal(shape, np.float32) * shape[-1] ** -0.5)

        self.weights, self.rows, self.caches = arguments(sizes, form, make)
        step = jax.jit(lambda *args: form(sizes, *args, table), donate_argnums=2)
        lowered = step.lower(self.weights, self.rows, self.caches, self.start)
        started = time.perf_counter()
        self.program = lowered.compile()
        self.compile_seconds = round(time.perf_counter() - started, 1)

    def __call__(self) -> None:
        out, self.caches = self.program(self.weights, self.rows, self.caches, self.start)
        jax.block_until_ready((out, self.caches))


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 8])
    parser.add_argument("--repeats", type=int, default=100)
    parser.add_argument("--json", metavar="FILE")
    asked = parser.parse_args()
    results = []
    for rows in asked.rows:
        sizes = Sizes(576, 1536, 9, 3, 64, 512, asked.layers, rows, transposed=True)
        runs = {form.__name__: Running(form, sizes, start=256) for form in (carried, unrolled)}
        compiled = {f"{name}_compile_seconds": run.compile_seconds for name, run in runs.items()}
        memory = {
            f"{name}_temp_bytes": run.program.memory_analysis().temp_size_in_bytes
            for name, run in runs.items()
        }
        results.append({"rows": rows} | alternate(runs, asked.repeats) | compiled | memory)
        print(results[-1], flush=True)
    if asked.json:
        write_results(asked.json, {"layers": asked.layers, "slots": 512, "steps": results})


if __name__ == "__main__":
    main()
