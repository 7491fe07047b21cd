"""Loads the target, tokenizer and drafter, or their configs, that the command line names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import torch
from safetensors import SafetensorError
from transformers import AutoConfig, AutoTokenizer

from torch_dflash.checks import names_a_folder
from torch_dflash.cli.errors import UserError, one_line, refusing
from torch_dflash.demo.pair import load_demo_drafter
from torch_dflash.demo.target import DemoModelError, load_demo_target
from torch_dflash.proposers import NGramProposer
from torch_dflash.proposers.checkpoints import load_drafter, load_drafter_config
from torch_dflash.published.load import IncompleteWeights, load_target
from torch_dflash.targets.truncate import keep_layers

# Errors of transformers and safetensors about a missing, damaged or foreign checkpoint.
UNREADABLE = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError, SafetensorError)
NGRAM_WIDTH = 8  # wider only pays where long passages are copied


@dataclass(frozen=True)
class Loaded:
    """A pair; ``drafter`` as `torch_dflash.compile` takes it: a drafter model, a proposer, or None."""

    target: Any
    tokenizer: Any
    drafter: Any


# Names with a meaning of their own. Everything else is a directory or a hub id.
TARGETS: dict[str, Callable[[Any], tuple[Any, Any]]] = {
    "demo": lambda dtype: load_demo_target(torch.float32 if dtype == "auto" else dtype),
}
DRAFTERS: dict[str, Callable[[Any, int | None], Any]] = {
    "demo": lambda dtype, block_size: load_demo_drafter(torch.float32 if dtype == "auto" else dtype),
    "none": lambda dtype, block_size: None,
    "ngram": lambda dtype, block_size: NGramProposer(NGRAM_WIDTH if block_size is None else block_size),
}
WITHOUT_WEIGHTS = ("none", "ngram")


def load_named(
    target: str,
    drafter: str | None,
    *,
    dtype: str = "auto",
    device: str | None = None,
    block_size: int | None = None,
    offered: Collection[str] = tuple(DRAFTERS),
) -> Loaded:
    """Load ``target`` and ``drafter`` by name, in evaluation mode on ``device`` (torch's; unset: the CPU).

    Args:
        target: a key of `TARGETS`, a directory, or a hub id.
        drafter: a key of `DRAFTERS`, a directory, or a hub id; None: nothing drafts.
        dtype: "float32", "bfloat16" or "auto", the type in which the weights are stored.
        block_size: width of a proposer that is made here (n-gram lookup).
        offered: keys of `DRAFTERS` that the caller takes, for the error about a missing drafter.

    Raises:
        UserError: a model does not exist, cannot be read, or is of the wrong kind.
    """
    place, kind = place_of(device), kind_of(dtype)
    if target in TARGETS:
        with refusing(DemoModelError, before=f"--target {target}: "):
            model, tokenizer = TARGETS[target](kind)
    else:
        model, tokenizer = _load_target(target, kind)
    found: dict[str, Any] = {"dtype": dtype, "device": device, "block_size": block_size, "offered": offered}
    drafts = load_named_drafter("none" if drafter is None else drafter, **found)
    return Loaded(model.to(place).eval(), tokenizer, drafts)


def load_named_drafter(
    drafter: str,
    *,
    dtype: str = "auto",
    device: str | None = None,
    block_size: int | None = None,
    offered: Collection[str] = tuple(DRAFTERS),
) -> Any:
    """Load ``drafter`` by name; arguments and errors as of `load_named`."""
    place, kind = place_of(device), kind_of(dtype)
    if drafter in DRAFTERS:
        with refusing(ValueError, before=f"--drafter {drafter}: "):
            drafts = DRAFTERS[drafter](kind, block_size)
    else:
        folder = existing("--drafter", drafter, offered)
        with reading("--drafter", drafter):
            drafts = load_drafter(folder, dtype=kind)
    return cast(Any, drafts).to(place).eval() if isinstance(drafts, torch.nn.Module) else drafts


def kind_of(dtype: str) -> Any:
    """The torch type that ``--dtype`` names; "auto" as it is."""
    return dtype if dtype == "auto" else getattr(torch, dtype)


def load_configs(target: str, drafter: str, block_size: int | None, layers: int | None) -> tuple[Any, Any]:
    """Read the configs of ``target`` and ``drafter``: each a directory, its config.json, or a hub id.

    Args:
        target: a causal LM.
        drafter: a drafter, or one of `WITHOUT_WEIGHTS`.
        block_size: width of n-gram lookup.
        layers: keep this many of the target's layers, and map the drafter's taps onto them.

    Returns:
        The target's config, and the drafter as `jax_bridge.aot.compile.abstract_pair` takes it.

    Raises:
        UserError: a model does not exist, cannot be read, or is of the wrong kind.
    """
    config = _target_config(target, existing("--target", _folder(target), ()))
    if drafter in WITHOUT_WEIGHTS:
        with reading("--drafter", drafter):
            drafts = DRAFTERS[drafter](None, block_size)
    else:
        folder = existing("--drafter", _folder(drafter), WITHOUT_WEIGHTS)
        with reading("--drafter", drafter):
            drafts = load_drafter_config(folder)
    if layers is not None:
        if layers > (depth := config.get_text_config().num_hidden_layers):
            raise UserError(f"--layers {layers}: the target has {depth}; ask for at most that many.")
        keep_layers(config, drafts, layers)
    return config, drafts


def _folder(source: str) -> str:
    path = Path(source)
    return str(path.parent) if path.name == "config.json" and path.is_file() else source


def place_of(device: str | None) -> torch.device:
    """The torch device that ``--device`` names (unset: the CPU).

    Raises:
        UserError: torch has no such device here, or it holds no values.
    """
    try:
        place = torch.device(device or "cpu")
        torch.empty(0, device=place)
    except (RuntimeError, AssertionError) as error:
        raise UserError(
            f"--device {device}: {one_line(error)}; use a device torch has, such as cpu."
        ) from None
    if place.type == "meta":
        raise UserError(f"--device {device}: tensors there hold no values; use a real one, such as cpu.")
    return place


def _load_target(source: str, dtype: Any) -> tuple[Any, Any]:
    folder = existing("--target", source, TARGETS)
    config = _target_config(source, folder)
    with reading("--target", source), refusing(IncompleteWeights, before="--target "):
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return load_target(folder, dtype, config), tokenizer


def _target_config(source: str, folder: str) -> Any:
    with reading("--target", source):
        config = AutoConfig.from_pretrained(folder)
    if hasattr(config, "dflash_config"):
        raise UserError(f"--target {source}: that is a DFlash drafter; pass it as --drafter.")
    return config


def existing(field: str, source: str, names: Collection[str]) -> str:
    """``source``, or its path with ``~`` expanded; a missing path never becomes a hub request."""
    path = Path(source).expanduser()
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise UserError(
                f"{field} {source}: the directory holds no config.json; pass a model's directory."
            )
        return str(path)
    if names_a_folder(source) or path.exists():
        known = f"a directory, a hub id, or one of {', '.join(names)}" if names else "a directory or a hub id"
        raise UserError(f"{field} {source}: no such directory; pass {known}.")
    return source


@contextmanager
def reading(field: str, source: str) -> Iterator[None]:
    """Turns the errors of transformers about an unreadable checkpoint into a `UserError`."""
    try:
        yield
    except Exception as error:
        damage = error if isinstance(error, SafetensorError) else error.__cause__
        if isinstance(damage, SafetensorError):
            raise UserError(
                f"{field} {source}: its weights are damaged ({one_line(damage)}); fetch or export them again."
            ) from None
        if not isinstance(error, UNREADABLE):
            raise
        raise UserError(
            f"{field} {source}: {one_line(error)} (It must be a directory, or a hub id that can be fetched "
            "from here.)"
        ) from None
