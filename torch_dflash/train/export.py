"""A fitted drafter as a checkpoint in z-lab's layout, with a model card."""

from __future__ import annotations

import copy
import json
import shutil
from pathlib import Path
from typing import Any

import torch

from torch_dflash.drafter import DFlashDraftModel
from torch_dflash.train.files import MANIFEST, naming_a_full_disk
from torch_dflash.train.log import read_log


def export_drafter(
    drafter: DFlashDraftModel, directory: Path, target: Any, fitted: Path, dtype: torch.dtype = torch.bfloat16
) -> None:
    """Write ``config.json``, ``model.safetensors`` (in ``dtype``) and ``README.md`` to ``directory``.

    ``fitted`` is the fit's directory, whose settings and log go into the card.
    """
    copied: Any = copy.deepcopy(drafter)
    copied = copied.to(dtype)
    copied.config.architectures = ["DFlashDraftModel"]
    with naming_a_full_disk(directory):
        copied.save_pretrained(directory)
        for weights in directory.glob("*.safetensors"):  # safetensors writes for the owner alone
            shutil.copymode(directory / "config.json", weights)
        (directory / "README.md").write_text(model_card(drafter, target, fitted))


def model_card(drafter: DFlashDraftModel, target: Any, fitted: Path) -> str:
    """The card: what it drafts for, how it was trained, how it did on the held-out sequences."""
    config: Any = drafter.config
    name = Path(target.config.name_or_path).name or type(target).__name__
    settings = json.loads((fitted / MANIFEST).read_text())
    lines = read_log(fitted / "log.jsonl")
    last = [line for line in lines if line["kind"] == "held_out"][-1]
    weights = sum(parameter.numel() for parameter in drafter.parameters())
    recipe = "\n".join(f"| {key} | {value} |" for key, value in settings.items())
    rates = ", ".join(f"{rate:.3f}" for rate in last["accuracy"])
    return f"""---
library_name: torch-dflash
tags: [dflash, speculative-decoding]
---

# DFlash drafter for {name}

Drafts blocks of {config.block_size} (the anchor included) for {name}: {weights / 1e6:.2f} M weights in
{config.num_hidden_layers} layers, taps {config.target_layer_ids}, mask id {config.mask_token_id}. It has no
embedding and no head: both are the target's. The output of speculative decoding is the target's own.

```python
import torch_dflash as td

drafter = td.DFlashDraftModel.from_pretrained("path/to/this/directory", dtype=target.dtype)
out = td.generate(target, drafter, **inputs, max_new_tokens=256, return_dict_in_generate=True)
print(out.stats.mean_acceptance_length)
```

## Training

{last["step"]} steps in {last["seconds"] / 60:.0f} minutes, on answers that the target itself wrote.

| setting | value |
| --- | --- |
{recipe}

On held-out answers, at random anchors: acceptance length {last["acceptance_length"]:.2f}; accuracy of
position 1 to {len(last["accuracy"])} (each alone): {rates}.
"""
