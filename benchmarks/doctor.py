"""Measures whether `torch_dflash.doctor` names the faults of 270 tiny pairs with none, one or two.

    OMP_NUM_THREADS=1 python benchmarks/doctor.py --json docs/results/doctor.json

Each pair has its own seed, family and sizes; its drafter learns by one convention, and is judged by a config
of another. Of the first 200, 150 have one or two faults, 25 are healthy, 25 weak (hardly trained).
30 more are DFlash2, with one fault or none. 40 more are asked by a chat template of another form: 20
learned from answers to the other one, ten of them with a fault besides; 20 from answers to this one, or to
both. Cases that the JSON has are not run again.
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from judged_pairs import ASKED, OTHERWISE, kinds_of, make_case

from torch_dflash.cli.outputs import write_results
from torch_dflash.doctor import judge_texts
from torch_dflash.doctor.answers import with_other_way
from torch_dflash.selftest.pairs import FAMILIES

STEPS, FEW = 150, 12
COUNTS = {"healthy": 25, "weak": 25, "one": 90, "two": 60}
COUNTS |= {"dflash2": 10, "dflash2, one": 20}
COUNTS |= {"template": 10, "template, one": 10, "no template": 10, "both templates": 10}
FAULTS = {"one": 1, "two": 2, "dflash2, one": 1, "template, one": 1}
LEARNED = {"template": (OTHERWISE,), "template, one": (OTHERWISE,), "both templates": (ASKED, OTHERWISE)}
SECOND = {"selector_rank": 8, "selector_top_k": 6, "conv_group_size": 4}
OTHER_WAY = {"enable_thinking": False}
WINDOW = {"layer_types": ["sliding_attention"] * 2, "sliding_window": 9, "use_sliding_window": True}


def plan() -> list[dict[str, Any]]:
    """Every case: its seed, family, sizes and the kinds of its faults."""
    cases = []
    for group, count in COUNTS.items():
        for _ in range(count):
            seed = len(cases)
            draw = random.Random(seed)
            family = sorted(FAMILIES)[seed % len(FAMILIES)]
            sizes = {"num_hidden_layers": draw.choice([4, 5, 6]), "vocab_size": draw.choice([97, 131])}
            drafter = {"block_size": draw.choice([5, 6, 8]), "num_hidden_layers": draw.choice([1, 2])}
            if draw.random() < 0.3:
                drafter |= WINDOW | {"layer_types": ["sliding_attention"] * drafter["num_hidden_layers"]}
            drafter |= SECOND if group.startswith("dflash2") else {}
            possible = sorted(kinds_of(family, drafter, **sizes))
            kinds = draw.sample(possible, FAULTS.get(group, 0))
            cases.append({"group": group, "seed": seed, "family": family, "sizes": sizes} | {
                "drafter": drafter, "kinds": kinds
            })  # fmt: skip
    return cases


def run(case: dict[str, Any]) -> dict[str, Any]:
    """The doctor's findings for a case."""
    group = case["group"]
    steps, templates = FEW if group == "weak" else STEPS, LEARNED.get(group, (ASKED,))
    made = make_case(
        case["family"], 100 * case["seed"], tuple(case["kinds"]), steps, case["drafter"], templates,
        **case["sizes"],
    )  # fmt: skip
    found = judge_texts(made.target, made.drafter, made.texts, masks=made.masks)
    if "template" in group:
        there = judge_texts(made.target, made.drafter, made.others, masks=made.masks)
        found = with_other_way(found, there, OTHER_WAY)
    elsewhere = {f"{name}={value}": "template" for name, value in OTHER_WAY.items()}
    elsewhere = elsewhere if templates == (OTHERWISE,) else {}
    return {
        "seed": case["seed"],
        "group": group,
        "family": case["family"],
        "learned": sorted([*(change.name for change in made.learned), *elsewhere]),
        "kinds": sorted([*case["kinds"], *elsewhere.values()]),
        "named": sorted(change.name for change in found.changes),
        "named_kinds": sorted(change.kind for change in found.changes),
        "verdict": found.verdict,
        "length": round(found.length, 3),
        "better": round(found.better, 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and the confusion matrix: counts by fault and by named fault."""
    faulty = [row for row in rows if row["kinds"]]
    sound = [row for row in rows if not row["kinds"]]
    right = [row for row in faulty if row["named"] == row["learned"]]
    pairs = Counter(
        (" + ".join(row["kinds"]) or row["group"], " + ".join(row["named_kinds"]) or row["verdict"])
        for row in rows
    )
    matrix: dict[str, dict[str, int]] = {}
    for (was, named), count in sorted(pairs.items()):
        matrix.setdefault(was, {})[named] = count
    return {
        "pairs": len(rows),
        "faulty": len(faulty),
        "named rightly": len(right),
        "share": round(len(right) / max(1, len(faulty)), 4),
        "sound": len(sound),
        "false alarms": sum(row["verdict"] == "broken" for row in sound),
        "matrix": matrix,
    }


def main() -> None:
    """Run the missing cases; the JSON is written after each case."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", required=True)
    parser.add_argument("--only", type=int, nargs="*", help="seeds of the cases to run")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    path = Path(arguments.json)
    rows = json.loads(path.read_text())["rows"] if path.exists() else []
    known = {row["seed"] for row in rows}
    for case in plan():
        if case["seed"] in known or (arguments.only and case["seed"] not in arguments.only):
            continue
        started = time.perf_counter()
        rows.append(run(case) | {"seconds": 0.0})
        rows[-1]["seconds"] = round(time.perf_counter() - started, 1)
        write_results(
            arguments.json, {"summary": summary(rows), "rows": sorted(rows, key=lambda row: row["seed"])}
        )
        row = rows[-1]
        sign = (
            ""
            if row["named"] == row["learned"] and (row["kinds"] or row["verdict"] != "broken")
            else "  <-- "
        )
        print(
            f"{row['seed']:3d} {row['family']:8s} {row['learned']} -> {row['verdict']} {row['named']}{sign}",
            flush=True,
        )
    print(json.dumps(summary(rows), indent=1))


if __name__ == "__main__":
    main()
