"""Does `torch_dflash.doctor` name what is wrong with a pair? 200 tiny ones: none, one or two faults.

    OMP_NUM_THREADS=1 python benchmarks/doctor.py --json docs/results/doctor.json

Each pair has its own seed, family and sizes; its drafter learns by one convention, and is judged by a config
that says another. 150 have one or two faults, 25 are healthy, 25 weak (hardly trained). Cases that the JSON
has are not run again.
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
from judged_pairs import kinds_of, make_case

from torch_dflash.cli.provenance import write_json
from torch_dflash.doctor import judge_texts
from torch_dflash.selftest.pairs import FAMILIES

STEPS, FEW = 150, 12
COUNTS = {"healthy": 25, "weak": 25, "one": 90, "two": 60}
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
            possible = sorted(kinds_of(family, drafter, **sizes))
            kinds = draw.sample(possible, {"one": 1, "two": 2}.get(group, 0))
            cases.append({"group": group, "seed": seed, "family": family, "sizes": sizes} | {
                "drafter": drafter, "kinds": kinds
            })  # fmt: skip
    return cases


def run(case: dict[str, Any]) -> dict[str, Any]:
    """What the doctor says of a case."""
    steps = FEW if case["group"] == "weak" else STEPS
    made = make_case(
        case["family"], 100 * case["seed"], tuple(case["kinds"]), steps, case["drafter"], **case["sizes"]
    )
    found = judge_texts(made.target, made.drafter, made.texts, masks=made.masks)
    return {
        "seed": case["seed"],
        "group": case["group"],
        "family": case["family"],
        "learned": sorted(change.name for change in made.learned),
        "kinds": sorted(case["kinds"]),
        "named": sorted(change.name for change in found.changes),
        "named_kinds": sorted(change.kind for change in found.changes),
        "verdict": found.verdict,
        "length": round(found.length, 3),
        "better": round(found.better, 3),
    }


def summary(rows: list[dict[str, Any]]) -> dict[str, Any]:
    """Shares and the confusion matrix: what was wrong, what was named, how often."""
    faulty = [row for row in rows if row["group"] in ("one", "two")]
    sound = [row for row in rows if row["group"] in ("healthy", "weak")]
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
    """Run what is not there yet; the JSON is written after each case."""
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
        write_json(
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
