"""Files a command writes when it is done: refused before it begins if they cannot be written."""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

from torch_dflash.cli.errors import UserError


def check_outputs(**files: str | Path | None) -> None:
    """Raise `UserError` unless every file, by the name of its option, can be written; None is unset."""
    for option, given in files.items():
        if given is None:
            continue
        path, field = Path(given).absolute(), f"--{option} {given}"
        if not path.parent.is_dir():
            raise UserError(f"{field}: its folder does not exist; make it first.")
        if path.is_dir():
            raise UserError(f"{field}: is a directory; name a file.")
        if not os.access(path if path.exists() else path.parent, os.W_OK):
            raise UserError(f"{field}: may not be written; choose another place.")
        if option == "png" and importlib.util.find_spec("matplotlib") is None:
            raise UserError(f"{field}: needs matplotlib; install it with: pip install 'torch-dflash[demo]'")


def check_folder(out: Path) -> None:
    """Raise `UserError` if ``--out`` is, or lies in, a file."""
    for path in (out, *out.absolute().parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {out}: {path} is a file; name a directory.")
