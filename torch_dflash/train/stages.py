"""The directory of a stage: one process at a time, and only with the settings it was begun with."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from torch_dflash.storage.files import StageError, naming_a_full_disk, write_json
from torch_dflash.train.files import MANIFEST

LOCK = ".lock"


@contextmanager
def open_stage(directory: Path, settings: dict[str, Any], made: str) -> Iterator[None]:
    """Make ``directory`` the home of a stage with ``settings``, or go on in one that has the same.

    No other process can open it until the ``with`` block ends, or until this process does.

    Args:
        made: pattern of the files that the stage makes, such as ``features-*``.

    Raises:
        StageError: another process is at work there; the directory holds the stage with other settings, for
            mixing the two would go unnoticed; or what says its settings is missing or damaged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        _check_settings(directory, json.loads(json.dumps(settings)), made)
        yield


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    path = directory / LOCK
    file = _locked(path)
    try:
        with naming_a_full_disk(path):
            file.write(f"pid {os.getpid()} on {socket.gethostname()}")
            file.flush()
        yield
    finally:
        path.unlink(missing_ok=True)  # first: who opens it now waits for nobody
        file.close()


def _locked(path: Path) -> Any:
    """The open file at ``path``, locked; the lock ends with the process, however that ends."""
    while True:
        file = path.open("a+")
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            file.seek(0)
            holder = file.read() or "just started"
            file.close()
            if not isinstance(error, BlockingIOError):
                raise StageError(
                    f"{path.parent}: its file system cannot lock files ({error.strerror}), so two runs could "
                    "mix there unnoticed; choose a directory on another one."
                ) from error
            raise StageError(
                f"another process ({holder}) is at work in {path.parent}; wait for it or choose another "
                "directory."
            ) from None
        with suppress(FileNotFoundError):  # removed by the one before, between opening and locking
            if os.path.samestat(os.fstat(file.fileno()), path.stat()):
                file.truncate(0)  # what a killed process left
                return file
        file.close()


def _check_settings(directory: Path, settings: dict[str, Any], made: str) -> None:
    manifest = directory / MANIFEST
    if not manifest.exists():
        left = sorted(directory.glob(made))
        if left:
            raise StageError(
                f"{directory} holds {left[0].relative_to(directory)}, but no {MANIFEST} that says how it was "
                f"made: restore that file, choose another directory, or delete {made} there to begin anew."
            )
        write_json(manifest, settings)
        return
    before = _read_settings(manifest, made)
    changed = [name for name in before | settings if before.get(name) != settings.get(name)]
    if not changed:
        return
    # What a user chose says more than the checksums that differ with it.
    name = min(changed, key=lambda name: (name != "stage", name.endswith(("checksum", "weights")), name))
    if name not in before or name not in settings:
        raise StageError(
            f"{directory} was begun by another version of torch-dflash: {name} is in one {MANIFEST} only. "
            "Choose another directory."
        )
    raise StageError(
        f"{directory} was begun with {name}={before[name]!r}, now {name}={settings[name]!r}: go on with the "
        "old value, or choose another directory."
    )


def _read_settings(manifest: Path, made: str) -> dict[str, Any]:
    try:
        return dict(json.loads(manifest.read_text()))
    except (ValueError, TypeError) as error:
        raise StageError(
            f"{manifest} is damaged ({error}): restore it, or choose another directory; to begin anew, "
            f"delete it and {made} there."
        ) from error
