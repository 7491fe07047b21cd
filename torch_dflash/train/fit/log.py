"""A fit's log as JSON lines, and its picture."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

from torch_dflash.storage.files import naming_a_full_disk, write_atomically
from torch_dflash.train.stages import MANIFEST


class TrainLog:
    """``log.jsonl`` in ``directory``; a resume from ``step`` drops lines of later steps."""

    def __init__(self, directory: Path, step: int):
        self.path = directory / "log.jsonl"
        kept = [line for line in read_log(self.path) if line["step"] <= step]
        text = "".join(json.dumps(line) + "\n" for line in kept)
        write_atomically(self.path, lambda part: part.write_text(text))

    def write(self, **line: Any) -> None:
        """Append one line on disk at once."""
        with naming_a_full_disk(self.path), self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


def read_log(path: Path) -> list[dict[str, Any]]:
    """Lines of a log, without a last line cut short by a kill."""
    lines = []
    for line in path.read_text().splitlines() if path.exists() else ():
        try:
            lines.append(json.loads(line))
        except json.JSONDecodeError:
            break
    return lines


def check_drawing() -> None:
    """Raise ``ModuleNotFoundError`` without matplotlib, before a fit."""
    if importlib.util.find_spec("matplotlib") is None:
        raise ModuleNotFoundError("the picture of a fit needs matplotlib: pip install matplotlib")


def draw_log(directory: Path) -> Path:
    """Loss and acceptance length over the steps, as ``training.png``.

    Raises:
        ModuleNotFoundError: matplotlib is missing (extra ``train``).
    """
    from matplotlib.figure import Figure

    lines = read_log(directory / "log.jsonl")
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    labels = _labels(directory)
    for kind, style in (("train", "-"), ("held_out", "o-")):
        of_kind = [line for line in lines if line["kind"] == kind]
        steps = [line["step"] for line in of_kind]
        left.plot(steps, [line["loss"] for line in of_kind], style, markersize=3, label=labels[kind])
        right.plot(
            steps, [line["acceptance_length"] for line in of_kind], style, markersize=3, label=labels[kind]
        )
    left.set(xlabel="step", ylabel="loss")
    right.set(xlabel="step", ylabel="acceptance length at random anchors")
    left.legend(loc="upper right")
    right.legend(loc="upper left")
    path = directory / "training.png"
    write_atomically(path, lambda part: figure.savefig(part, format="png", dpi=120))
    return path


def _labels(directory: Path) -> dict[str, str]:
    # With sampled ids the losses of the two curves run over different vocabularies.
    manifest = directory / MANIFEST
    settings = json.loads(manifest.read_text()) if manifest.exists() else {}
    if settings.get("sampled_vocabulary") is None:
        return {"train": "training", "held_out": "held out"}
    return {"train": "training (loss over sampled ids)", "held_out": "held out (loss over all ids)"}
