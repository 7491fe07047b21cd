"""Counts bytes of each chip of a slice in a round, and exchanges of the chips, for large pairs.

No TPU, no weights; libtpu compiles rounds of two target layers and one drafter layer in their real width::

    PYTHONPATH=.venv/libtpu python benchmarks/slices_aot.py --json docs/results/slices_aot.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jax_bridge.offline import compile_only

compile_only()

from large_pairs import large_pair  # noqa: E402

from jax_bridge import aot  # noqa: E402
from jax_bridge.aot.compile import place_of  # noqa: E402
from jax_bridge.aot.hlo import (  # noqa: E402
    Program,  # noqa: E402
    exchanges,
    least_seconds,
)
from jax_bridge.aot.shapes import floor_on_slice  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402

CONTEXT, CAPACITY = 4000, 4064
CASES = (
    ("qwen3-32b", "v5e:2x4", 8),
    ("qwen3-32b", "v6e:2x4", 8),
    ("qwen3-32b", "v5p:2x2x1", 4),
    ("llama-3.3-70b", "v5p:2x2x2", 8),
    ("llama-3.3-70b", "v5e:4x4", 16),
    ("qwen3-coder-30b-a3b", "v5e:2x4", 8),
    ("gpt-oss-120b", "v5e:2x4", 8),
)


def figures(pair: str, topology: str, chips: int) -> dict:
    """Figures of one chip's share of a round, batch 1, 16 rows, on pages."""
    model = aot.abstract_pair(*large_pair(pair), capacity=CAPACITY, cache="paged", matmul_precision="default")
    compiled = aot.compile_step(model, "round", topology=topology, chips=chips)
    floor = floor_on_slice(model, place_of(model, topology, chips), CONTEXT).round
    found = exchanges(Program(compiled.hlo))
    least = least_seconds(found, chips, topology)
    return {
        "pair": pair,
        "topology": topology,
        "chips": chips,
        "target_layers": model.pair.target.config.num_hidden_layers,
        "drafter_layers": model.pair.proposer.drafter.config.num_hidden_layers,
        "rows": model.pair.plan.verify_width,
        "hidden_size": model.pair.target.hidden_size,
        "hbm_bytes": compiled.traffic_bytes,
        "floor_bytes": floor,
        "ratio": round(compiled.traffic_bytes / floor, 3),
        "unaliased": compiled.unaliased,
        "exchanges": [one._asdict() for one in found],
        "exchange_least_us": None if least is None else round(1e6 * least, 1),
    }


def main() -> None:
    """Compile all and print the bytes of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    rounds = []
    for case in CASES:
        rounds.append(figures(*case))
        print({name: value for name, value in rounds[-1].items() if name != "exchanges"}, flush=True)
    if options.json:
        write_results(str(options.json), {"context": CONTEXT, "cache": "paged", "rounds": rounds})


if __name__ == "__main__":
    main()
