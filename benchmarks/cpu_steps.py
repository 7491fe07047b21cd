"""Plain steps and rounds of the demo pair on this CPU by type and capacity, and of transformers.

    python benchmarks/cpu_steps.py --json docs/results/cpu_steps.json

With 40 tokens of context and more, the time of a step at ``max_length`` 512, 2,048 and 8,192; then the time
to the first token of prompts of 100, 500 and 1,500 tokens. All take turns in one process; medians.
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import Any

import torch

import torch_dflash as td
from torch_dflash.cli.outputs import write_results

QUESTION = "Natalia sold clips to 48 of her friends in April, and then she sold half as many clips in May."
CAPACITIES = (512, 2048, 8192)
PROMPTS = (100, 500, 1500)
NEW = 64


def plain_call(model: Any, ids: torch.Tensor, new: int) -> float:
    """Seconds of transformers' greedy ``generate``."""
    options: Any = {"max_new_tokens": new, "min_new_tokens": new, "do_sample": False, "eos_token_id": None}
    started = time.perf_counter()
    model.generate(ids, attention_mask=torch.ones_like(ids), **options)
    return time.perf_counter() - started


def runs_of(dtype: str) -> dict[tuple, Any]:
    """The timed runs of this type by name: functions that give a dict of milliseconds."""
    target, drafter, tokenizer = td.load_demo_pair(getattr(torch, dtype), progress=False)
    ids = tokenizer(QUESTION, return_tensors="pt").input_ids
    runs: dict[tuple, Any] = {}

    def ours(engine: td.Engine, ids: torch.Tensor, new: int) -> dict[str, float]:
        call: Any = {"max_new_tokens": new, "do_sample": False, "eos_token_id": None}
        stats = engine.generate(ids, torch.ones_like(ids), return_dict_in_generate=True, **call).stats
        found = {"first_token_ms": stats.time_to_first_token * 1e3}
        if new > 1:
            found["token_ms"] = stats.time_per_output_token * 1e3
            found["round_ms"] = found["token_ms"] * (stats.new_tokens - 1) / stats.rounds
            found["acceptance_length"] = stats.mean_acceptance_length
        return found

    for capacity in CAPACITIES:
        for method, drafts in (("plain", None), ("DFlash", drafter)):
            engine = td.compile(target, drafts, max_length=capacity, filters=False)
            runs[dtype, method, capacity] = lambda engine=engine: ours(engine, ids, NEW)
            if drafts is None and capacity == 2048:
                for count in PROMPTS:
                    long = ids.repeat(1, -(-count // ids.shape[1]))[:, :count]
                    runs[dtype, "first token", count] = lambda e=engine, long=long: ours(e, long, 1)
    runs[dtype, "transformers", None] = lambda: {
        "token_ms": (plain_call(target, ids, NEW) - plain_call(target, ids, 1)) / (NEW - 1) * 1e3
    }
    for count in PROMPTS:
        long = ids.repeat(1, -(-count // ids.shape[1]))[:, :count]
        runs[dtype, "transformers, first token", count] = lambda long=long: {
            "first_token_ms": plain_call(target, long, 1) * 1e3
        }
    return runs


def main() -> None:
    """Measure, print, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", metavar="FILE", help="write the figures here")
    parser.add_argument("--repeats", type=int, default=5)
    asked = parser.parse_args()
    runs = runs_of("float32") | runs_of("bfloat16")
    found: dict[tuple, list[dict]] = {name: [] for name in runs}
    for repeat in range(asked.repeats + 1):
        for name, run in runs.items():
            figures = run()
            if repeat:  # the first compiles
                found[name].append(figures)
    rows = [
        {"dtype": dtype, "method": method, "size": size}
        | {key: round(statistics.median(one[key] for one in figures), 2) for key in figures[0]}
        for (dtype, method, size), figures in found.items()
    ]
    for row in rows:
        print(*row.values(), sep="\t")
    if asked.json:
        results = {"threads": torch.get_num_threads(), "question": QUESTION}
        write_results(asked.json, results | {"new_tokens": NEW, "rows": rows})


if __name__ == "__main__":
    main()
