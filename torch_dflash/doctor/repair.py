"""A drafter's config.json with the fields of a diagnosis, the old one kept beside it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch_dflash.proposers.dflash.config import NESTED_FIELDS
from torch_dflash.storage.files import write_whole

CONFIG = "config.json"


def repair(folder: Path, fields: dict[str, Any]) -> Path:
    """Write ``fields`` into the config of ``folder``; returns a copy of the old one.

    Raises:
        FileExistsError: the copy's name is taken. OSError: the files cannot be read or written.
    """
    path, copy = folder / CONFIG, folder / f"{CONFIG}.before"
    old = path.read_text()
    if copy.exists():
        raise FileExistsError(f"{copy} is there from an earlier repair; move it away first.")
    config = json.loads(old)
    for name, value in fields.items():
        if name in NESTED_FIELDS and config.get("dflash_config") is not None:
            config["dflash_config"][name] = value
        if name in config or name not in (config.get("dflash_config") or {}):
            config[name] = value
    write_whole(copy, lambda part: part.write_text(old))
    write_whole(path, lambda part: part.write_text(json.dumps(config, indent=2) + "\n"))
    return copy
