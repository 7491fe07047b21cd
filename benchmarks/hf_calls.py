"""Runs every way to call transformers' ``generate`` through our doors: the same text, or a refusal.

    OMP_NUM_THREADS=1 python benchmarks/hf_calls.py --json docs/results/hf_calls.json

A tiny random pair, a left-padded ragged batch of two, eagerly. Greedy calls are compared with
``target.generate`` without us; sampled ones run twice with a seed.
"""

from __future__ import annotations

import argparse
import copy
from typing import Any

import torch
from hf_call_list import CALLS, PAIR, Call

import torch_dflash as td
from torch_dflash.cli.errors import one_line
from torch_dflash.cli.outputs import write_results

COMMON = {"max_new_tokens": 12, "pad_token_id": 0, "eos_token_id": 96, "do_sample": False}
SAME, OTHER, SEEDED = "same text", "other text", "runs, and by its seed again"
AS_IF = "transformers' text of padding to the left"


def ours(target: Any, asked: dict[str, Any]) -> torch.Tensor:
    """Through `torch_dflash.generate`."""
    return tokens(td.generate(target, PAIR[1], **asked, runtime="eager"))


def through(target: Any, asked: dict[str, Any]) -> torch.Tensor:
    """Through the target's own ``generate``."""
    return tokens(target.generate(**asked, custom_generate=td.dflash(PAIR[1], runtime="eager")))


DOORS = {"td.generate": ours, "target.generate": through}


def tokens(out: Any) -> torch.Tensor:
    """The ids of either kind of output."""
    return out if isinstance(out, torch.Tensor) else out.sequences


def verdict(door: Any, target: Any, call: Call, want: torch.Tensor | str) -> str:
    """The outcome of a call through ``door``."""
    seed = {"seed": 3} if call.make().get("do_sample") else {}
    try:
        found = door(target, asked(call, call.inputs) | seed)
        again = door(target, asked(call, call.inputs) | seed) if seed else found
    except (TypeError, ValueError, NotImplementedError, ImportError) as error:
        return f"refused: {one_line(error)}"
    except Exception as error:
        if type(error).__name__ != want:
            raise
        return f"{want}, as without us"
    if seed:
        return SEEDED if torch.equal(found, again) else OTHER
    if isinstance(want, str):
        return f"runs; transformers raises {want}"
    if call.as_if is not None:  # the prompts are not the same
        width = call.as_if["input_ids"].shape[1]
        return AS_IF if torch.equal(found[:, width:], want[:, width:]) else OTHER
    return SAME if torch.equal(found, want) else OTHER


def asked(call: Call, inputs: dict[str, Any]) -> dict[str, Any]:
    """All arguments of a call, made anew."""
    return copy.deepcopy(inputs) | COMMON | copy.deepcopy(call.make())


def run() -> dict[str, dict[str, str]]:
    """The verdict on each call of `CALLS`, by door."""
    found: dict[str, dict[str, str]] = {}
    for name, call in CALLS.items():
        target = copy.deepcopy(PAIR[0]) if call.model else PAIR[0]
        target.generation_config.update(**call.model)
        want: torch.Tensor | str
        try:
            want = tokens(target.generate(**asked(call, call.as_if or call.inputs)))
        except Exception as error:  # noqa: BLE001 - whatever transformers says about its own call
            want = type(error).__name__
        found[name] = {title: verdict(door, target, call, want) for title, door in DOORS.items()}
    return found


def main() -> None:
    """Run all calls, print and write the outcomes."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--json", required=True)
    arguments = parser.parse_args()
    calls = run()
    write_results(arguments.json, {"calls": calls})
    for name, verdicts in calls.items():
        print(name, *verdicts.values(), sep="\t")


if __name__ == "__main__":
    main()
