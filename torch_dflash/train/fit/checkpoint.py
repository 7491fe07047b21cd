"""Checkpoints of a fit: one safetensors file with weights, moments and the step, whole or absent."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from torch_dflash.storage.files import StageError
from torch_dflash.train.features.tensorfiles import reading_tensors, write_tensors

KEPT = 2


@dataclass(frozen=True)
class FitCheckpoint:
    """The state of a fit; orders, anchors and rates follow from ``step``.

    ``weights``, ``first`` and ``second`` (AdamW's moments) go by the drafter's parameter names on both
    runtimes, so a fit may continue on the other one. ``seconds``: time spent so far.
    """

    step: int
    seconds: float
    weights: dict[str, Tensor]
    first: dict[str, Tensor]
    second: dict[str, Tensor]


def save_checkpoint(directory: Path, checkpoint: FitCheckpoint) -> Path:
    """Write the checkpoint and remove all but the last `KEPT`; refuses weights that are not finite."""
    bad = [name for name, value in checkpoint.weights.items() if not torch.isfinite(value).all()]
    if bad:
        raise StageError(
            f"{bad[0]} is not finite at step {checkpoint.step}: the fit has diverged; earlier ones are kept. "
            "Lower the learning rate in a new directory, or look for damaged features."
        )
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"step-{checkpoint.step:08}.safetensors"
    groups = {"weights": checkpoint.weights, "first": checkpoint.first, "second": checkpoint.second}
    tensors = {f"{group}/{name}": value for group, named in groups.items() for name, value in named.items()}
    tensors = {name: value.detach().cpu().contiguous().clone() for name, value in tensors.items()}
    write_tensors(path, tensors, {"step": str(checkpoint.step), "seconds": str(checkpoint.seconds)})
    for old in sorted(directory.glob("step-*.safetensors"))[:-KEPT]:
        old.unlink()
    return path


def load_latest(directory: Path) -> FitCheckpoint | None:
    """The last checkpoint under ``directory``, if there is one.

    Raises:
        StageError: a damaged checkpoint; the message says which file to delete to go on from the one before.
    """
    paths = sorted(directory.glob("step-*.safetensors"))
    if not paths:
        return None
    before = f"the one before, {paths[-2].name}" if len(paths) > 1 else "the beginning"
    remedy = f"delete it and run the same command again: it goes on from {before}."
    groups: dict[str, dict[str, Tensor]] = {"weights": {}, "first": {}, "second": {}}
    with reading_tensors(paths[-1], remedy) as (file, metadata):
        for key in file.keys():  # noqa: SIM118
            group, name = key.split("/", 1)
            groups[group][name] = file.get_tensor(key)
        return FitCheckpoint(int(metadata["step"]), float(metadata["seconds"]), **groups)
