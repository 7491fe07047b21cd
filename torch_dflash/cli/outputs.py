"""Files that a command writes: checked before it begins, written with the provenance of their figures."""

from __future__ import annotations

import datetime
import importlib.util
import json
import os
import platform
import shlex
import sys
import tempfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from torch_dflash.cli.errors import UserError
from torch_dflash.storage.machine import processor

LOAD = getattr(os, "getloadavg", lambda: (None,))()[0]
"""Load of the machine in the minute before this process began to measure; None: the system does not tell."""
PACKAGES = ("torch-dflash", "torch", "torchax", "jax", "jaxlib", "transformers")


def check_writable(**files: str | Path | None) -> None:
    """Raise `UserError` unless every file can be written; by the names of the options, None: unset."""
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
    beside = option == "png"  # written beside its place, then moved there
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
    """Make the directory that ``--option`` names; raises `UserError` if no file can be written there."""
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
    # Tried with a temporary file: a folder whose mode allows writing may lie on a read-only disk.
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def provenance() -> dict:
    """Command, date, versions, hardware and the load before this process."""
    return {
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "python": platform.python_version(),
        "packages": versions(),
        "hardware": hardware(),
        "load_before": LOAD,
    }


def write_results(path: str, results: dict) -> None:
    """Write ``results`` with their provenance to ``path``."""
    Path(path).write_text(json.dumps({"provenance": provenance(), **results}, indent=1) + "\n")


def versions() -> dict[str, str | None]:
    """The version of each of `PACKAGES`; None: not installed."""
    return {name: _version(name) for name in PACKAGES}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def hardware() -> str:
    """The accelerators of JAX or the CUDA device of torch, if this process runs on one, or the processor."""
    jax, torch = sys.modules.get("jax"), sys.modules.get("torch")  # only if this process decodes with them
    if jax is not None and jax.devices()[0].platform != "cpu":
        return f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    if torch is not None and torch.cuda.is_initialized():
        return f"{torch.cuda.get_device_name()}; CPU: {processor()}"
    return f"CPU: {processor()}"
