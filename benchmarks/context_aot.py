"""Bytes of a round on a static cache with room for more than its context: cost follows the context.

No TPU, no weights; libtpu compiles once for one chip::

    PYTHONPATH=.venv/libtpu python benchmarks/context_aot.py --json docs/results/context_aot.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jax_bridge.offline import compile_only

compile_only()

from jax_bridge import aot  # noqa: E402
from jax_bridge.aot.floor import floor_of  # noqa: E402
from torch_dflash.cli.loading import load_configs  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402

CAPACITY = 8192
CONTEXTS = (160, 512, 2048, CAPACITY)
CONFIG = str(Path(__file__).parent / "configs" / "qwen3-4b")


def main() -> None:
    """Compile the round and print its bytes at each context."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--topology", default="v5p:2x2x1")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    configs = load_configs(CONFIG, f"{CONFIG}-dflash", None, None)
    model = aot.abstract_pair(*configs, capacity=CAPACITY, cache="static")
    compiled, results = aot.compile_step(model, "round", topology=options.topology), []
    for context in CONTEXTS:
        moved, floor = compiled.traffic_at(context), floor_of(model.pair, model.params, context).round
        results.append({"context": context, "hbm_bytes": moved, "floor_bytes": floor, "ratio": moved / floor})
        print(f"{context:6} tokens: {moved / 1e9:.3f} GB, {moved / floor:.3f} of the floor", flush=True)
    if options.json:
        write_results(options.json, {"topology": options.topology, "capacity": CAPACITY, "results": results})


if __name__ == "__main__":
    main()
