"""A target and a drafter by their configs alone, for what needs no weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from torch_dflash.cli.errors import UserError
from torch_dflash.cli.loading import DRAFTERS, existing, reading
from torch_dflash.proposers.checkpoints import load_drafter_config
from torch_dflash.targets.fewer import keep_layers

WITHOUT_WEIGHTS = ("none", "ngram")


def load_configs(target: str, drafter: str, block_size: int | None, layers: int | None) -> tuple[Any, Any]:
    """Read what ``target`` and ``drafter`` name: a directory, its config.json, or a hub id.

    Args:
        target: a causal LM.
        drafter: a drafter, or one of `WITHOUT_WEIGHTS`.
        block_size: width of n-gram lookup.
        layers: keep this many of the target's layers, and map the drafter's taps onto them.

    Returns:
        The target's config, and what `jax_bridge.aot.compile.abstract_pair` takes as a drafter.

    Raises:
        UserError: something does not exist, cannot be read, or is not what it should be.
    """
    folder = existing("--target", _folder(target), ())
    with reading("--target", target):
        config: Any = AutoConfig.from_pretrained(folder)
    if hasattr(config, "dflash_config"):
        raise UserError(f"--target {target}: that is a DFlash drafter; pass it as --drafter.")
    if drafter in WITHOUT_WEIGHTS:
        with reading("--drafter", drafter):
            drafts = DRAFTERS[drafter](None, block_size)
    else:
        folder = existing("--drafter", _folder(drafter), WITHOUT_WEIGHTS)
        with reading("--drafter", drafter):
            drafts = load_drafter_config(folder)
    if layers is not None:
        _check_depth(config, layers)
        keep_layers(config, drafts, layers)
    return config, drafts


def _folder(source: str) -> str:
    path = Path(source)
    return str(path.parent) if path.name == "config.json" and path.is_file() else source


def _check_depth(target: Any, layers: int) -> None:
    depth = target.get_text_config().num_hidden_layers
    if layers > depth:
        raise UserError(f"--layers {layers}: the target has {depth}; ask for at most that many.")
