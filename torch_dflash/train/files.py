"""Checks that no shard of a stage is missing."""

from __future__ import annotations

import re
from pathlib import Path

from torch_dflash.storage.files import StageError

MANIFEST = "stage.json"


def check_shards(directory: Path, files: list[Path], remedy: str) -> None:
    """Raise ``StageError`` unless all of the shards ``...-00000-of-00003...`` among ``files`` are there."""
    counts = [int(found[1]) for file in files if (found := re.search(r"-\d+-of-(\d+)\.", file.name))]
    if len(set(counts)) > 1:
        raise StageError(
            f"{directory} holds shards of {' and of '.join(map(str, sorted(set(counts))))}, of different "
            "runs; delete those of one."
        )
    if counts and len(counts) < counts[0]:
        raise StageError(f"{directory} holds {len(counts)} of {counts[0]} shards; {remedy}")
