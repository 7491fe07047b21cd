"""Files that are whole or absent: atomic writes, and stages that continue where they stopped."""

from __future__ import annotations

import errno
import glob
import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError

from torch_dflash.files import write_whole

MANIFEST = "stage.json"


class StageError(RuntimeError):
    """A stage cannot go on; the message says what was kept and what to do."""


class Stopped(StageError):
    """A stage was asked to stop, and left everything needed to go on."""


@contextmanager
def naming_a_full_disk(path: Path) -> Iterator[None]:
    """Turn what a write under this raises when there is no room for ``path`` into a `StageError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        # safetensors writes in Rust: the number is only in its message.
        found = re.search(r"os error (\d+)", str(error))
        number = getattr(error, "errno", None) or (int(found[1]) if found else None)
        if number == errno.EFBIG:
            raise StageError(
                f"{path} would be larger than a file may be here; nothing written before is lost. Raise the "
                "limit (ulimit -f) or choose another disk, and run the same command again: it goes on from "
                "here."
            ) from error
        if number not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free // 10**6
        raise StageError(
            f"the disk of {path.parent} is full ({free} MB free) while writing {path.name}; nothing written "
            "before is lost. Free some space and run the same command again: it goes on from here."
        ) from error


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """`torch_dflash.files.write_whole`, cleaning up after processes that were killed in it.

    Raises:
        StageError: the disk is full; what was there before is untouched.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        left.unlink(missing_ok=True)  # of a process that was killed while it wrote this file
    with naming_a_full_disk(path):
        write_whole(path, write)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, whole or not at all."""
    write_atomically(path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n"))


def open_stage(directory: Path, settings: dict[str, Any]) -> Path:
    """Make ``directory`` the home of a stage with ``settings``, or go on in one that has the same.

    Raises:
        StageError: the directory holds the stage with other settings; mixing the two would go unnoticed.
    """
    directory.mkdir(parents=True, exist_ok=True)
    manifest = directory / MANIFEST
    settings = json.loads(json.dumps(settings))
    if manifest.exists():
        before = json.loads(manifest.read_text())
        changed = sorted(name for name in before | settings if before.get(name) != settings.get(name))
        if changed:
            name = next((name for name in changed if name != "checksum"), "checksum")  # of the data
            raise StageError(
                f"{directory} was begun with {name}={before.get(name)!r}, now {name}={settings.get(name)!r}: "
                "go on with the old value, or choose another directory."
            )
    else:
        write_json(manifest, settings)
    return directory
