"""Files a command writes when it is done: refused before it begins if they cannot be written."""

from __future__ import annotations

import importlib.util
import os
import tempfile
from pathlib import Path

from torch_dflash.cli.errors import UserError


def check_outputs(**files: str | Path | None) -> None:
    """Raise `UserError` unless every file, by the name of its option, can be written; None is unset."""
    taken: dict[str, str] = {}
    for option, given in files.items():
        if given is not None:
            try:
                _check_output(option, given, taken)
            except OSError as error:  # a name that is too long, say
                raise UserError(f"--{option} {given}: {error.strerror}; name another file.") from None


def _check_output(option: str, given: str | Path, taken: dict[str, str]) -> None:
    path, field = Path(given).absolute(), f"--{option} {given}"
    if (other := taken.setdefault(os.path.realpath(path), option)) != option:
        raise UserError(f"{field}: --{other} is written there too; name another file.")
    if not path.parent.is_dir():
        raise UserError(f"{field}: its folder does not exist; make it first.")
    if path.is_dir():
        raise UserError(f"{field}: is a directory; name a file.")
    beside = option == "png"  # it is written there and put in its place
    if beside and path.exists() and not path.is_file():
        raise UserError(f"{field}: is not a regular file; name another.")
    ready = path.exists() and not beside
    if not (os.access(path, os.W_OK) if ready else _holds_new_files(path.resolve().parent)):
        raise UserError(f"{field}: may not be written; choose another place.")
    if beside and importlib.util.find_spec("matplotlib") is None:
        raise UserError(f"{field}: needs matplotlib: pip install matplotlib")


def check_folder(out: Path) -> None:
    """Raise `UserError` if ``--out`` is, or lies in, a file."""
    for path in (out, *out.absolute().parents):
        if path.exists() and not path.is_dir():
            raise UserError(f"--out {out}: {path} is a file; name a directory.")


def make_folder(option: str, given: str) -> Path:
    """The directory that ``--option`` names, made if need be; `UserError` if no file can be written there."""
    folder, field = Path(given), f"--{option} {given}"
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except FileExistsError:
        raise UserError(f"{field}: that is a file; name a directory.") from None
    except OSError as error:
        raise UserError(f"{field}: cannot be made ({error.strerror}); choose another place.") from None
    if not _holds_new_files(folder):
        raise UserError(f"{field}: no file can be written there; choose another place.")
    return folder


def _holds_new_files(folder: Path) -> bool:
    """Tried with a file that goes at once: what may be written by its mode can still be read-only."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False
