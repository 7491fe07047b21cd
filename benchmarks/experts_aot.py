"""Compares the bytes of a mixture's experts on a TPU: read in place, gathered per row, or a ragged product.

No TPU, no weights; libtpu compiles for one chip::

    PYTHONPATH=.venv/libtpu python benchmarks/experts_aot.py --json docs/results/experts_aot.json

The first part compiles verify passes of Qwen3-Coder-30B-A3B's dimensions with our experts and with
transformers' ``batched_mm``; the second one `jax.lax.ragged_dot` of its experts, stored either way round.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from unittest import mock

from jax_bridge.offline import compile_only

compile_only()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402

from jax_bridge import aot  # noqa: E402
from jax_bridge.aot.floor import floor_of  # noqa: E402
from torch_dflash.cli.loading import load_configs  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402
from torch_dflash.targets import skeleton  # noqa: E402

CONFIGS = Path(__file__).parent / "configs/qwen3-coder-30b-a3b"
CONTEXT, TOPOLOGY = 4096, "v5p:2x2x1"


def figures(compiled: aot.CompiledStep, floor: int) -> dict:
    """Bytes, their ratio to ``floor``, and temporaries."""
    moved = compiled.traffic_bytes
    return {"hbm_bytes": moved, "ratio": round(moved / floor, 3), "peak_temp_bytes": compiled.temp_bytes}


def verify(experts: str, rows: int, layers: int) -> dict:
    """A verify pass whose experts are transformers' implementation ``experts``, or ours."""
    with mock.patch.object(skeleton, "EXPERTS", experts):
        target, drafter = load_configs(str(CONFIGS), f"{CONFIGS}-dflash", None, layers)
        model = aot.abstract_pair(target, drafter, capacity=CONTEXT, verify_width=rows, cache="paged")
        compiled = aot.compile_step(model, "verify", topology=TOPOLOGY)
    floor = floor_of(model.pair, model.params, CONTEXT).verify
    return {"experts": experts, "rows": rows, "layers": layers} | figures(compiled, floor)


def ragged(stored: str, rows: int) -> dict:
    """One layer's first expert product of ``rows`` rows, 8 experts each, sorted by expert."""
    config, _ = load_configs(str(CONFIGS), f"{CONFIGS}-dflash", None, 2)
    inner, outer = config.hidden_size, 2 * config.moe_intermediate_size
    shape = (inner, outer) if stored == "[experts, in, out]" else (outer, inner)
    weights = jax.ShapeDtypeStruct((config.num_experts, *shape), jnp.bfloat16)
    pairs = jax.ShapeDtypeStruct((rows * config.num_experts_per_tok, inner), jnp.bfloat16)
    sizes = jax.ShapeDtypeStruct((config.num_experts,), jnp.int32)

    def product(weights, nothing, pairs, sizes):  # no state that could be donated
        return jax.lax.ragged_dot(pairs, weights if shape[0] == inner else weights.mT, sizes)

    compiled = aot.compile_function(product, weights, (), pairs, sizes, topology=TOPOLOGY)
    return {"stored": stored, "rows": rows} | figures(compiled, 2 * weights.size)


def main() -> None:
    """Compile all and print the bytes of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    passes, products = [], []
    for rows in options.rows:
        for experts in (skeleton.EXPERTS, "batched_mm"):
            passes.append(verify(experts, rows, options.layers))
            print(passes[-1], flush=True)
        for stored in ("[experts, in, out]", "[experts, out, in]"):
            products.append(ragged(stored, rows))
            print(products[-1], flush=True)
    if options.json:
        write_results(str(options.json), {"topology": TOPOLOGY, "verify": passes, "ragged_dot": products})


if __name__ == "__main__":
    main()
