"""The pair that comes with the library: SmolLM2-135M-Instruct and a drafter trained for it."""

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
    are Apache-2.0. How the drafter was trained and what it reaches stands in its model card beside it.

    Model and tokenizer are typed as `Any`, as transformers' Auto classes give them: what a tokenizer's
    ``apply_chat_template`` is annotated to return cannot be passed on as ``**inputs``.

    Args:
        dtype: type of both models' weights.
        progress: whether to say on stderr what is being fetched and converted.

    Raises:
        DemoModelError: the target could not be fetched; the message says what to do.
    """
    target, tokenizer = load_demo_target(dtype, progress)
    return target, load_demo_drafter(dtype), tokenizer


def load_demo_drafter(dtype: torch.dtype = torch.float32) -> DFlashDraftModel:
    """The drafter of `load_demo_pair` alone."""
    with as_file(files("torch_dflash") / "assets" / DRAFTER) as directory, only_our_lines():
        drafter: Any = DFlashDraftModel.from_pretrained(directory, dtype=dtype, local_files_only=True)
    return drafter.eval()


def demo_block_size() -> int:
    """Rows of its blocks, without its weights."""
    return json.loads((files("torch_dflash") / "assets" / DRAFTER / "config.json").read_text())["block_size"]


def load_demo_draft_ids() -> list[int]:
    """The ids that the target of `load_demo_pair` says most often, for `with_draft_vocabulary`.

    Counted on its own answers to the training prompts (``benchmarks/draft_ids.py``).
    """
    return json.loads((files("torch_dflash") / "assets" / DRAFTER / "draft_ids.json").read_text())
