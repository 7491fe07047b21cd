"""A stage's directory: one process at a time, and one set of settings."""

from __future__ import annotations

import json
import os
import re
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from torch_dflash.storage.files import StageError, naming_a_full_disk, write_json

LOCK, HOLDER = ".lock", ".lock.holder"
"""The lock file, which stays, and the file that names its holder: Windows cannot read a locked file."""


@contextmanager
def open_stage(directory: Path, settings: dict[str, Any], made: str) -> Iterator[None]:
    """Begin a stage with ``settings`` in ``directory``, or resume one with the same settings.

    No other process can open the directory until the ``with`` block or this process ends.

    Args:
        made: pattern of the files that the stage makes, such as ``features-*``.

    Raises:
        StageError: another process is at work there; the directory holds a stage with other settings, which
            would mix unnoticed; or the settings file is missing or damaged.
    """
    directory.mkdir(parents=True, exist_ok=True)
    with _alone(directory):
        _check_settings(directory, json.loads(json.dumps(settings)), made)
        yield


@contextmanager
def _alone(directory: Path) -> Iterator[None]:
    holder, lock = directory / HOLDER, FileLock(directory / LOCK)
    try:
        lock.acquire(timeout=0)
    except Timeout:
        named = holder.read_text() if holder.exists() else "just started"
        fix = "wait for it or choose another directory."
        raise StageError(f"another process ({named}) is at work in {directory}; {fix}") from None
    except (OSError, NotImplementedError) as error:
        why = f"its file system cannot lock files ({error})"
        raise StageError(f"{directory}: {why}; choose a directory on another one.") from error
    try:
        with naming_a_full_disk(holder):
            holder.write_text(f"pid {os.getpid()} on {socket.gethostname()}")
        yield
    finally:
        holder.unlink(missing_ok=True)
        lock.release()


def _check_settings(directory: Path, settings: dict[str, Any], made: str) -> None:
    manifest = directory / MANIFEST
    if not manifest.exists():
        left = sorted(directory.glob(made))
        if left:
            raise StageError(
                f"{directory} holds {left[0].relative_to(directory)}, but no {MANIFEST} with its settings: "
                f"restore that file, choose another directory, or delete {made} there to begin anew."
            )
        write_json(manifest, settings)
        return
    before = _read_settings(manifest, made)
    changed = [name for name in before | settings if before.get(name) != settings.get(name)]
    if not changed:
        return
    # Name a user's option before the checksums that differ with it.
    name = min(changed, key=lambda name: (name != "stage", name.endswith(("checksum", "weights")), name))
    if name not in before or name not in settings:
        begun = f"{directory} was begun by another version of torch-dflash"
        raise StageError(f"{begun}: {name} is in one {MANIFEST} only. Choose another directory.")
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


MANIFEST = "stage.json"


def check_shards(directory: Path, files: list[Path], remedy: str) -> None:
    """Raise ``StageError`` unless ``files`` holds every shard ``...-00000-of-00003...``."""
    counts = [int(found[1]) for file in files if (found := re.search(r"-\d+-of-(\d+)\.", file.name))]
    if len(set(counts)) > 1:
        sizes = " and of ".join(map(str, sorted(set(counts))))
        raise StageError(f"{directory} holds shards of {sizes}, of different runs; delete those of one.")
    if counts and len(counts) < counts[0]:
        raise StageError(f"{directory} holds {len(counts)} of {counts[0]} shards; {remedy}")
