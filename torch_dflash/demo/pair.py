"""The bundled pair: SmolLM2-135M-Instruct and a drafter trained for it."""

from __future__ import annotations

import json
from importlib.resources import as_file, files
from typing import Any

import torch

from torch_dflash.demo.target import load_demo_target, only_our_lines
from torch_dflash.proposers.dflash.model import DFlashDraftModel

DRAFTER = "smollm2-135m-instruct-dflash"


def load_demo_pair(
    dtype: torch.dtype = torch.float32, progress: bool = True
) -> tuple[Any, DFlashDraftModel, Any]:
    """SmolLM2-135M-Instruct, its drafter and its tokenizer, ready for `torch_dflash.generate`.

    The target is fetched on the first call (`load_demo_target`); the drafter is part of the package. Both
    are Apache-2.0. The drafter's model card describes its training and figures.

    Model and tokenizer are typed as `Any`, as from transformers' Auto classes: the annotated result of
    ``apply_chat_template`` cannot be passed on as ``**inputs``.

    Args:
        dtype: type of both models' weights.
        progress: whether to report fetching and converting on stderr.

    Raises:
        DemoModelError: the target could not be fetched; the message gives the fix.
    """
    target, tokenizer = load_demo_target(dtype, progress)
    return target, load_demo_drafter(dtype), tokenizer


def load_demo_drafter(dtype: torch.dtype = torch.float32) -> DFlashDraftModel:
    """The drafter of `load_demo_pair` alone."""
    with as_file(files("torch_dflash") / "assets" / DRAFTER) as directory, only_our_lines():
        drafter: Any = DFlashDraftModel.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return drafter.eval()


def demo_block_size() -> int:
    """The block size of the bundled drafter, read without its weights."""
    return json.loads((files("torch_dflash") / "assets" / DRAFTER / "config.json").read_text())["block_size"]


def load_demo_draft_ids() -> list[int]:
    """The most frequent ids of the target of `load_demo_pair`, for `with_draft_vocabulary`.

    Counted in the target's answers to the training prompts (``benchmarks/draft_ids.py``).
    """
    return json.loads((files("torch_dflash") / "assets" / DRAFTER / "draft_ids.json").read_text())
