"""The command that repeats a fit, as its card shows it."""

from __future__ import annotations

import dataclasses
import shlex
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_dflash.cli.errors import UserError
from torch_dflash.cli.loading import TARGETS
from torch_dflash.cli.options import read_options
from torch_dflash.cli.train_commands import MAX_LENGTH
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.heads import with_head
from torch_dflash.train.fit.options import SIZES_OF_HEADS, DrafterShape, FitOptions, Objective

DEMO = "SmolLM2-135M-Instruct"


def target_name(target: str) -> str:
    """A target as cards and figures name it: its id, or the name of its directory."""
    path = Path(target).expanduser()
    return DEMO if target in TARGETS else path.resolve().name if path.is_dir() else target


def fit_command(arguments: SimpleNamespace, processes: int = 1) -> str:
    """Everything that is not a default; of a path its last part alone, for a card names nobody's home."""
    launched = ["accelerate", "launch", "--num_processes", str(processes), "--no_python"]
    defaults: dict[str, Any] = {"target": None, "target_dtype": "auto", "features": None, "answers": None}
    defaults |= {"max_length": MAX_LENGTH, "start_from": None, "chat_template_kwargs": None, "out": None}
    defaults |= {
        field.name: None if field.default is dataclasses.MISSING else field.default
        for part in (DrafterShape, Objective, FitOptions)
        for field in dataclasses.fields(part)
    }
    words = [*(launched if processes > 1 else ()), "torch-dflash", "train", "fit"]
    for name, default in defaults.items():
        value = getattr(arguments, name)
        if value is None or value == default:
            continue
        words += ["--" + name.replace("_", "-"), *map(_word, value if isinstance(value, list) else [value])]
    return shlex.join(words)


def _word(value: Any) -> str:
    if isinstance(value, tuple):  # layers
        return ",".join(map(str, value))
    if isinstance(value, Path) or (isinstance(value, str) and Path(value).is_dir()):
        return Path(value).expanduser().resolve().name
    return str(value)


# What may be chosen beside --start-from: of parts that the drafter does not have yet.
GROWN = ("head", *SIZES_OF_HEADS)


def drafter_to_fit(loaded: Any, arguments: SimpleNamespace) -> DFlashDraftModel:
    """A new drafter for ``loaded.target``, or ``loaded.drafter`` with the parts of ``--head``."""
    if arguments.start_from is None:
        if arguments.mask_token_id is None:
            raise UserError(
                "--mask-token-id: a new drafter needs one, an id that no text holds; --start-from takes that "
                "of the drafter."
            )
        return new_drafter(loaded.target, read_options(DrafterShape, arguments))
    if not isinstance(loaded.drafter, DFlashDraftModel):
        raise UserError(f"--start-from {arguments.start_from}: pass a DFlash drafter's directory or id.")
    for field in dataclasses.fields(DrafterShape):
        if field.name not in GROWN and getattr(arguments, field.name) not in (None, field.default):
            raise UserError(
                f"--{field.name.replace('_', '-')}: --start-from takes the drafter's own; leave one out."
            )
    sizes = {name: getattr(arguments, name) for name in GROWN[1:]}
    return with_head(loaded.drafter, arguments.head, **sizes)
