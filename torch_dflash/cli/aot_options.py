"""Shared parts of ``aot`` and ``fit-memory``: configs read, figures shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from transformers import AutoConfig

from torch_dflash.checks import positions_of
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.loading import DRAFTERS, existing, reading
from torch_dflash.cli.provenance import provenance, write_json
from torch_dflash.cli.tpu_commands import BY_HAND, STDOUT
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.checkpoints import load_drafter_config
from torch_dflash.targets.truncate import keep_layers


def plan_of(arguments: SimpleNamespace) -> dict[str, Any]:
    """The plan's fields that were asked for."""
    names = (field.name for field in dataclasses.fields(DecodePlan) if field.name not in BY_HAND)
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def read_configs(arguments: SimpleNamespace) -> tuple[Any, Any]:
    """Both configs, and `UserError` for whatever needs no more than them to be refused."""
    layers = getattr(arguments, "layers", None)
    target, drafter = load_configs(arguments.target, arguments.drafter, arguments.block, layers)
    longest = positions_of(target)
    if arguments.context > longest:
        raise UserError(
            f"--context {arguments.context}: is beyond the target's max_position_embeddings={longest}; "
            "lower it."
        )
    return target, drafter


def show(results: dict[str, Any], file: str | None, table: Callable[[], str]) -> None:
    """Results as ``--json`` asks for them, and else as a table."""
    if file == STDOUT:
        _print_json(results)
        return
    if file is not None:
        _write_or_print(file, results)
    print(table())


def _print_json(results: dict[str, Any]) -> None:
    print(json.dumps({"provenance": provenance(), **results}, indent=1))


def _write_or_print(file: str, results: dict[str, Any]) -> None:
    try:
        write_json(file, results)
    except OSError as error:
        _print_json(results)  # minutes of compiling
        raise UserError(
            f"--json {file}: could not be written ({error.strerror}); the figures went to standard output."
        ) from None


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
