r"""Compares a round with a tree and one with a chain of as many rows, compiled for TPUs that are not there.

No TPU, no weights; libtpu compiles for one chip, or for several that share each weight::

    PYTHONPATH=.venv/libtpu python benchmarks/trees_aot.py --json docs/results/trees_aot.json
    PYTHONPATH=.venv/libtpu python benchmarks/trees_aot.py --layers 5 --chips 4 \
        --json docs/results/trees_slices_aot.json

A chain of more rows than the drafter's block drafts a block as wide as its verify pass. Lines of the JSON
file are not compiled again.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from jax_bridge.offline import compile_only

compile_only()

from jax_bridge import aot  # noqa: E402
from jax_bridge.aot.floor import CHIPS  # noqa: E402
from jax_bridge.aot.hlo import Program, forbidden  # noqa: E402
from torch_dflash.cli.loading import load_configs  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402

CONFIGS = Path(__file__).parent / "configs/qwen3-4b"
TOPOLOGIES = ("v5p:2x2x1", "v5e:2x2", "v6e:2x2")


def figures(
    topology: str, rows: int, tree: bool, layers: int | None, context: int, chips: int
) -> dict[str, Any]:
    """Figures of a round of ``rows`` verified rows; on a slice, of one of its chips."""
    target, drafter = load_configs(str(CONFIGS), f"{CONFIGS}-dflash", None, layers)
    how = {"rows": rows} if tree else {"verify_width": rows, "block_size": max(rows, drafter.block_size)}
    pair = aot.abstract_pair(target, drafter, capacity=context, cache="paged", **how)
    step = aot.compile_step(pair, "round", topology=topology, chips=chips)
    chip = CHIPS[topology.partition(":")[0]]
    return {
        "topology": topology,
        "chips": chips,
        "rows": rows,
        "draft": "tree" if tree else "chain",
        "hbm_bytes": step.traffic_bytes,
        "flops": int(step.cost["flops"]),
        "hbm_ms": round(1e3 * step.traffic_bytes / chip.bandwidth, 4),
        "peak_temp_bytes": step.temp_bytes,
        "unaliased": step.unaliased,
        "scatters": step.hlo.count(" scatter("),
        "collectives": Program(step.hlo).collectives(),
        "forbidden": forbidden(step.hlo),
        "compile_seconds": round(step.compile_seconds, 1),
    }


def main() -> None:
    """Compile all and print the bytes of each."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, help="of the target, instead of all")
    parser.add_argument("--context", type=int, default=4096)
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 16, 64])
    parser.add_argument("--topologies", nargs="+", default=TOPOLOGIES)
    parser.add_argument("--chips", type=int, default=1, help="of each topology, which share each weight")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = {"layers": options.layers, "context": options.context}
    found = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    rounds = found.get("rounds", []) if size.items() <= found.items() else []
    made = {(one["topology"], one["chips"], one["rows"]) for one in rounds}
    for topology in options.topologies:
        for rows in options.rows:
            if (topology, options.chips, rows) in made:
                continue
            pair = [figures(topology, rows, tree, **size, chips=options.chips) for tree in (False, True)]
            pair[1]["ratio"] = round(pair[1]["hbm_bytes"] / pair[0]["hbm_bytes"], 4)
            rounds += pair
            for one in pair:
                print(one, flush=True)
            if options.json:
                write_results(str(options.json), size | {"rounds": rounds})


if __name__ == "__main__":
    main()
