"""v1, v1 with convolutions, DFlash2, DSpark: fitted to the same features for the same minutes, then judged.

A fit's learning rate follows its steps, so each head gets as many steps as the minutes hold by its own pace:
that of a short fit with the same options, made first. The JSON also has the times of the fits. Run again,
the program resumes. Options behind ``--`` are those of ``torch-dflash train fit``.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open

from torch_dflash.cli.outputs import write_results
from torch_dflash.train.fit.log import read_log

HEADS = ("dflash", "convolutions", "dflash2", "dspark")
PACE_STEPS, LEFT_OUT = 30, 10  # the first steps touch memory for the first time


def main() -> None:
    """Fit and judge every head, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--target", default="demo")
    parser.add_argument("--features", required=True)
    parser.add_argument("--prompts", nargs="+", required=True)
    parser.add_argument("--limit", type=int, default=100, help="prompts of each set")
    parser.add_argument("--minutes", type=float, required=True, help="of each fit")
    parser.add_argument("--heads", nargs="+", default=list(HEADS), choices=HEADS)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--json", required=True)
    arguments, fit = parser.parse_known_args()
    fit = [word for word in fit if word != "--"]
    rows = {head: judge(arguments, head, fit) for head in arguments.heads}
    write_results(arguments.json, {"minutes": arguments.minutes, "fit_options": fit, "heads": rows})


def judge(arguments: argparse.Namespace, head: str, options: list[str]) -> dict:
    """One head's figures: its pace, its fit, its acceptance on held-out answers and on every set."""
    home = arguments.out / head
    common = ["--target", arguments.target, "--features", arguments.features, "--head", head, *options]
    planned = home / "steps.json"
    if not planned.exists():
        run("fit", *common, "--steps", PACE_STEPS, "--log-steps", 1, "--out", home / "pace")
        pace = seconds_a_step(home / "pace")
        steps = {"seconds_a_step": round(pace, 3), "steps": max(1, round(60 * arguments.minutes / pace))}
        planned.write_text(json.dumps(steps))
    planned = json.loads(planned.read_text())
    run("fit", *common, "--steps", planned["steps"], "--out", home / "fit")
    drafter, figures = home / "fit" / "drafter", home / "figures.json"
    judged = ["--limit", arguments.limit, "--json", figures]
    common = ["--target", arguments.target, "--drafter", drafter]
    run("evaluate", *common, "--prompts", *arguments.prompts, *judged)
    lines = [line for line in read_log(home / "fit" / "log.jsonl") if line["kind"] == "held_out"]
    sets = json.loads(figures.read_text())["sets"]
    kept = ("acceptance_length", "per_position", "rounds", "new_tokens", "seconds")
    return planned | {
        "weights": weights(drafter),
        "minutes": round(lines[-1]["seconds"] / 60, 2),
        "held_out": lines[-1],
        "curve": [[line["step"], line["seconds"], line["acceptance_length"]] for line in lines],
        "sets": {name: {key: row[key] for key in kept if key in row} for name, row in sets.items()},
    }


def seconds_a_step(directory: Path) -> float:
    """The mean seconds of the later steps of a fit."""
    lines = [line for line in read_log(directory / "log.jsonl") if line["kind"] == "train"]
    return (lines[-1]["seconds"] - lines[LEFT_OUT - 1]["seconds"]) / (lines[-1]["step"] - LEFT_OUT)


def weights(drafter: Path) -> dict[str, int]:
    """Counts all weights, and those in rows of the selector's codebooks."""
    counted = {"all": 0, "codebooks": 0}
    with safe_open(drafter / "model.safetensors", "pt") as file:
        for name in file.keys():  # noqa: SIM118
            size = math.prod(file.get_slice(name).get_shape())
            counted["all"] += size
            counted["codebooks"] += size if "codebook" in name else 0
    return counted


def run(stage: str, *words: object) -> None:
    """One stage of ``torch-dflash train``; it ends this program if it fails."""
    subprocess.run([sys.executable, "-m", "torch_dflash", "train", stage, *map(str, words)], check=True)


if __name__ == "__main__":
    main()
