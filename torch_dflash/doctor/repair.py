"""A drafter's config.json with the fields of a diagnosis, the old one kept beside it."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from torch_dflash.proposers.dflash.config import NESTED_FIELDS
from torch_dflash.storage.files import write_whole

CONFIG, COPY = "config.json", "config.json.before"


def check_repairable(folder: Path) -> None:
    """Raise ``OSError`` if the config of ``folder`` could not be written, or the old one not be kept."""
    if (folder / COPY).exists():
        raise FileExistsError(f"{folder / COPY} is there from an earlier repair; move it away first.")
    with tempfile.TemporaryFile(dir=folder):  # what may be written by its mode can still be read-only
        pass


def repair(folder: Path, fields: dict[str, Any]) -> Path:
    """Write ``fields`` into the config of ``folder``; returns a copy of the old one.

    Raises:
        FileExistsError: the copy's name is taken. OSError: the files cannot be read or written.
    """
    check_repairable(folder)
    path, copy = folder / CONFIG, folder / COPY
    old = path.read_text()
    config = json.loads(old)
    for name, value in fields.items():
        inside = [config[block] for block in ("dflash_config", "dspark_config") if config.get(block)]
        holders = [block for block in inside if name in block or name in NESTED_FIELDS]
        for block in holders:
            block[name] = value
        if name in config or not holders:
            config[name] = value
    write_whole(copy, lambda part: part.write_text(old))
    write_whole(path, lambda part: part.write_text(json.dumps(config, indent=2) + "\n"))
    return copy
