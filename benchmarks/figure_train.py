"""Training's figures: the speed of steps, the course of fits, and the worth of drafters by head."""

from __future__ import annotations

import re
from typing import Any

from figure_text import RESULTS, command, result, table

from torch_dflash.train.fit.log import read_log

SETS = {"gsm8k": "GSM8K", "mbpp": "MBPP", "humaneval": "HumanEval", "mt-bench": "MT-Bench"}


def throughput() -> str:
    """Training steps against the peers'."""
    results = result("train_throughput_cpu")["results"]
    head = ["blocks/s", *(f"{one['size']['name']}, {one['dtype']}" for one in results)]
    rows: dict[str, list[str]] = {}
    for column, one in enumerate(results):
        for row in one["rows"]:
            name = re.sub(r"\b[1-9]\d* ids", "sampled ids", row["name"])
            cells = rows.setdefault(name, [""] * len(results))
            cells[column] = f"{row['blocks_per_second']:.1f}"
    return table(head, *([name, *cells] for name, cells in rows.items()))


def embedded_fit() -> str:
    """The course of the embedded drafter's fit."""
    last = read_log(RESULTS / "embedded_fit.jsonl")[-1]
    return (
        f"The fit took {last['seconds'] / 60:.0f} minutes: {last['step']} steps. In the end the acceptance "
        f"length at random anchors of held-out answers was {last['acceptance_length']:.2f}"
    )


def train_heads() -> str:
    """The heads, fitted to the same features for the same minutes."""
    heads = result("train_heads")["heads"]
    sets = list(next(iter(heads.values()))["sets"])
    head = ["`--head`", "weights", "steps", "minutes", "held out", *(SETS[name] for name in sets)]
    rows = [_head_row(name, one, sets) for name, one in heads.items()]
    return table(head, *rows)


def _head_row(name: str, one: dict[str, Any], sets: list[str]) -> list[str]:
    weights = f"{one['weights']['all'] / 1e6:.1f} M"
    if codebooks := one["weights"]["codebooks"]:
        weights += f", {codebooks / 1e6:.1f} M of them codebooks"
    lengths = [one["held_out"]["acceptance_length"], *(one["sets"][key]["acceptance_length"] for key in sets)]
    return [f"`{name}`", weights, str(one["steps"]), f"{one['minutes']:.0f}", *(f"{x:.2f}" for x in lengths)]


def train_heads_command() -> str:
    """The command that fitted and judged the heads."""
    return command(f"python benchmarks/{result('train_heads')['provenance']['command']}")


def sampled_drafts() -> str:
    """Acceptance lengths of sampled text, drafted in two ways."""
    drafters = result("sampled_drafts")["drafters"]
    sets = list(next(iter(drafters.values())))
    head = ["drafter", "drafts", *(SETS[name] for name in sets)]
    rows = [
        [
            f"`{drafter}`",
            form,
            *(f"{found[key][form]:.2f}" for key in sets),
        ]
        for drafter, found in drafters.items()
        for form in ("likeliest", "shared noise")
    ]
    return table(head, *rows)
