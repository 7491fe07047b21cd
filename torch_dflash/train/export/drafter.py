"""A fitted drafter as a checkpoint in z-lab's layout, with a model card."""

from __future__ import annotations

import copy
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.storage.files import naming_a_full_disk
from torch_dflash.train.answers.provenance import TEMPLATE
from torch_dflash.train.export.card import CARD, acceptance_section, model_card

WEIGHTS = "model.safetensors"


def export_drafter(
    drafter: DFlashDraftModel,
    directory: Path,
    target: Any,
    fitted: Path,
    dtype: torch.dtype = torch.bfloat16,
    *,
    data: dict[str, Any] | None = None,
    name: str | None = None,
    command: str | None = None,
) -> None:
    """Write ``config.json``, ``model.safetensors`` (in ``dtype``) and ``README.md`` to ``directory``.

    Figures that `card.add_figures` put into the card stay while the weights are the same.

    Args:
        fitted: the fit's directory, whose settings and log go into the card.
        data: what `train.answers.provenance` says; None: the card says that it is not recorded.
        name: the target's, for the card; unset: that of its directory.
        command: what repeats the fit.
    """
    copied: Any = copy.deepcopy(drafter)
    copied = copied.to(dtype)
    copied.config.architectures = [type(drafter).__name__]
    if data is not None and data[TEMPLATE]:  # evaluations ask as the answers were asked
        copied.config.dflash_config[TEMPLATE] = data[TEMPLATE]
    name = name or Path(target.config.name_or_path).name or type(target).__name__
    figures = acceptance_section(directory) if _same_weights(directory, copied) else ""
    card = model_card(drafter.config, drafter.num_parameters(), fitted, name, data, command)
    with naming_a_full_disk(directory):
        copied.save_pretrained(directory)
        for weights in directory.glob("*.safetensors"):  # safetensors writes for the owner alone
            shutil.copymode(directory / "config.json", weights)
        (directory / CARD).write_text(card + figures)


def trained_template(drafter: DFlashDraftModel) -> list[dict[str, Any]]:
    """Variables of the chat template that the drafter's answers were asked with; empty: not recorded."""
    config: Any = drafter.config
    return list(config.dflash_config.get(TEMPLATE) or [])


def _same_weights(directory: Path, drafter: Any) -> bool:
    try:
        before = load_file(directory / WEIGHTS)
    except (OSError, SafetensorError):
        return False
    now = drafter.state_dict()
    return before.keys() == now.keys() and all(torch.equal(before[key], now[key].cpu()) for key in now)
