"""Every way that transformers' ``generate`` is called, through our doors: the same text, or which refusal?

    OMP_NUM_THREADS=1 python benchmarks/hf_calls.py --json docs/results/hf_calls.json

A tiny random pair, a left-padded ragged batch of two, eagerly. Greedy calls are held against
``target.generate`` without us; sampled ones run twice with a seed.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from hf_call_list import CALLS

import torch_dflash as td
from torch_dflash.cli.errors import one_line
from torch_dflash.cli.provenance import write_json
from torch_dflash.selftest.pairs import make_pair, ragged_prompts

COMMON = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 96}
SAME, OTHER, SEEDED = "same text", "other text", "runs, and by its seed again"


def ours(pair: Any, inputs: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    """Through `torch_dflash.generate`."""
    return tokens(td.generate(*pair, **inputs, runtime="eager", **options))


def through(pair: Any, inputs: dict[str, Any], options: dict[str, Any]) -> torch.Tensor:
    """Through the target's own ``generate``."""
    block = td.dflash(pair[1], runtime="eager")
    return tokens(pair[0].generate(**inputs, custom_generate=block, **options))


DOORS = {"td.generate": ours, "target.generate": through}


def tokens(out: Any) -> torch.Tensor:
    """The ids of either kind of output."""
    return out if isinstance(out, torch.Tensor) else out.sequences


def verdict(door: Any, pair: Any, inputs: Any, options: dict[str, Any], want: torch.Tensor | str) -> str:
    """What came of a call."""
    seed = {"seed": 3} if options.get("do_sample") else {}
    try:
        found = door(pair, inputs, copy.deepcopy(options) | seed)
        again = door(pair, inputs, copy.deepcopy(options) | seed) if seed else found
    except (TypeError, ValueError, NotImplementedError) as error:
        return f"refused: {one_line(error)}"
    if seed:
        return SEEDED if torch.equal(found, again) else OTHER
    if isinstance(want, str):
        return f"runs; transformers raises {want}"
    return SAME if torch.equal(found, want) else OTHER


def run() -> dict[str, dict[str, str]]:
    """The verdict on each call of `CALLS`, by door."""
    pair = make_pair(agree=2.5)
    ids, mask = ragged_prompts(2)
    found: dict[str, dict[str, str]] = {}
    for name, call in CALLS.items():
        inputs = {"input_ids": ids, "attention_mask": mask}
        if call.one_row:
            inputs = {"input_ids": ids[:1], "attention_mask": mask[:1]}
        options = COMMON | {"do_sample": False} | call.make()
        want: torch.Tensor | str
        try:
            want = tokens(pair[0].generate(**inputs, **copy.deepcopy(options)))
        except Exception as error:  # noqa: BLE001 - whatever transformers says about its own call
            want = type(error).__name__
        found[name] = {
            title: verdict(door, pair, inputs, call.make_again(options), want)
            for title, door in DOORS.items()
        }
    return found


def main() -> None:
    """Run all calls, print and write what came of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    calls = run()
    write_json(arguments.json, {"calls": calls})
    for name, verdicts in calls.items():
        print(name, *verdicts.values(), sep="\t")


if __name__ == "__main__":
    main()
