"""Bytes of one prompt chunk through the whole of both models, on pages and on the static cache.

No TPU, no weights; libtpu compiles for one chip of each topology::

    PYTHONPATH=.venv/libtpu python benchmarks/prefill_aot.py --json docs/results/prefill_aot.json
"""

from __future__ import annotations

import argparse
from pathlib import Path

from jax_bridge.offline import compile_only

compile_only()

from transformers import AutoConfig  # noqa: E402

from jax_bridge import aot  # noqa: E402
from jax_bridge.aot.floor import chip_of, prefill_floor  # noqa: E402
from torch_dflash.cli.outputs import write_results  # noqa: E402
from torch_dflash.proposers.dflash.config import DFlashConfig  # noqa: E402

CONTEXT = 4096
CONFIGS = Path(__file__).parent / "configs"


def prefill(cache: str, topology: str, rows: int, layers: int) -> dict:
    """One compiled chunk of Qwen3-4B's dimensions, which ends at `CONTEXT` tokens."""
    target = AutoConfig.from_pretrained(CONFIGS / "qwen3-4b")
    drafter = DFlashConfig.from_pretrained(CONFIGS / "qwen3-4b-dflash")
    target.num_hidden_layers = drafter.num_target_layers = layers
    drafter.target_layer_ids = [layer * (layers - 1) // 4 for layer in range(5)]
    model = aot.abstract_pair(target, drafter, capacity=CONTEXT, cache=cache)
    compiled = aot.compile_step(model, "prefill", topology=topology, prompt_rows=rows)
    floor, chip = prefill_floor(model.pair, model.params, CONTEXT, rows), chip_of(topology)
    return {
        "topology": topology,
        "cache": cache,
        "rows": rows,
        "layers": layers,
        "hbm_bytes": compiled.traffic_bytes,
        "floor_bytes": floor,
        "ratio": compiled.traffic_bytes / floor,
        "peak_temp_bytes": compiled.temp_bytes,
        "memory_ms": 1e3 * compiled.traffic_bytes / chip.bandwidth,
        "flop_ms": 1e3 * compiled.cost["flops"] / chip.flops,
        "compile_seconds": compiled.compile_seconds,
    }


def main() -> None:
    """Compile the chunk for each topology and cache and print its bytes."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--rows", type=int, default=512)
    parser.add_argument("--topologies", nargs="+", default=["v5p:2x2x1", "v5e:2x2", "v6e:2x2"])
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    results = []
    for topology in options.topologies:
        for cache in ("paged", "static"):
            results.append(line := prefill(cache, topology, options.rows, options.layers))
            print(
                f"{topology:10} {cache:6} {line['hbm_bytes'] / 1e9:.3f} GB {line['ratio']:.3f} of the floor, "
                f"{line['peak_temp_bytes'] / 1e6:.1f} MB of temporaries; {line['memory_ms']:.2f} ms of HBM, "
                f"{line['flop_ms']:.2f} ms of FLOPs",
                flush=True,
            )
    if options.json:
        write_results(str(options.json), {"context": CONTEXT, "results": results})


if __name__ == "__main__":
    main()
