"""Measures how far cached forwards of transformers' models with recurrent layers are from uncached ones.

    OMP_NUM_THREADS=1 python benchmarks/cached_forwards.py --json docs/results/cached_forwards.json

A tiny random float32 model of each family reads 20 tokens: at once without a cache; token by token with one;
and 12 at once, then 8. Printed are the largest distances of logits, relative to the largest logit. Rounding
makes 1e-4 or less. No code of torch_dflash takes part in the models.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from family_configs import build
from family_runs import randomise
from transformers import DynamicCache

from torch_dflash.cli.outputs import write_results

CASES = (
    *("bamba", "jamba", "granitemoehybrid", "falcon_h1", "nemotron_h", "zamba2", "qwen3_next"),
    *("qwen3_5_text", "kimi_linear", "olmo_hybrid", "lfm2"),
)
READ, TOGETHER = 20, 8


def distances(case: str) -> dict[str, float]:
    """Distances of a family's cached forwards, by the way of reading the tokens."""
    torch.manual_seed(0)
    model: Any = randomise(build(case), 0)
    ids = torch.randint(3, 90, (1, READ))
    with torch.no_grad():
        whole = model(input_ids=ids, use_cache=False).logits
        cache = DynamicCache(config=model.config)
        one = [model(input_ids=ids[:, at : at + 1], cache=cache).logits for at in range(READ)]
        cache, first = DynamicCache(config=model.config), READ - TOGETHER
        model(input_ids=ids[:, :first], cache=cache)
        block = model(input_ids=ids[:, first:], cache=cache).logits
    gaps = {"token by token": torch.cat(one, dim=1) - whole, "8 behind 12": block - whole[:, first:]}
    return {name: float(gap.abs().max() / whole.abs().max()) for name, gap in gaps.items()}


def main() -> None:
    """Print each family's distances."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", default="", help="where to write them")
    asked = parser.parse_args()
    torch.set_num_threads(1)
    found = {case: distances(case) for case in CASES}
    for case, gaps in found.items():
        print(f"{case:20}", *(f"{name} {gap:.1e}" for name, gap in gaps.items()), sep="  ")
    if asked.json:
        write_results(asked.json, {"distances": found})


if __name__ == "__main__":
    main()
