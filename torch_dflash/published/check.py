"""The published drafters that the hub's cache holds, loaded and compared with what is known of them."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, scan_cache_dir
from safetensors import SafetensorError

from torch_dflash.proposers.checkpoints import load_drafter
from torch_dflash.published.rows import Checkpoint

COMPARED = ("num_hidden_layers", "block_size", "target_layer_ids", "num_target_layers", "mask_token_id")
"""Fields of a drafter's config that are held against the row's."""


@dataclass(frozen=True)
class Checked:
    """What came out for one pair.

    Attributes:
        name: of the pair. cached: whether the cache holds its drafter.
        problem: why it does not load or fit; None: it does, or it is not there.
        notes: what differs from the row, is odd, or could not be compared.
    """

    name: str
    cached: bool
    problem: str | None = None
    notes: list[str] = field(default_factory=list)


def check_cached(rows: Iterable[Checkpoint], cache_dir: str | Path | None = None) -> list[Checked]:
    """Load each drafter that the hub's cache holds, and check it against its target's config. Fetch nothing.

    Args:
        rows: the pairs. cache_dir: a cache other than huggingface_hub's own.

    Raises:
        OSError: there is no such cache.
    """
    try:
        held = {repo.repo_id: repo for repo in scan_cache_dir(cache_dir).repos if repo.repo_type == "model"}
    except (CacheNotFound, ValueError) as error:  # ValueError: the path is a file
        raise OSError(
            f"no hub cache could be read ({error}); fetch a drafter, or name another cache."
        ) from error
    return [
        _checked(row, held, cache_dir) if row.drafter in held else Checked(row.name, False) for row in rows
    ]


def _checked(row: Checkpoint, held: dict[str, Any], cache_dir: str | Path | None) -> Checked:
    notes: list[str] = []
    target = row.target if row.target is not None and _holds(held.get(row.target), "config.json") else None
    if target is None:
        notes.append(
            f"the config of {row.target or row.model} is not in the cache: the pair was not compared."
        )
    options: dict[str, Any] = {"local_files_only": True, "cache_dir": cache_dir}
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        try:
            config = load_drafter(str(row.drafter), target, **options).config
        except (OSError, ValueError, KeyError, TypeError, RuntimeError, SafetensorError) as error:
            return Checked(row.name, True, " ".join(str(error).split()), notes)
    notes += [str(one.message) for one in heard if str(one.message).startswith("note: ")]
    for name in COMPARED:
        said, own = getattr(row, name), getattr(config, name)
        own = tuple(own) if isinstance(said, tuple) else own
        if said is not None and own is not None and said != own:
            notes.append(f"{name}={own} in its config, {said} by {row.sources[name]}.")
    return Checked(row.name, True, None, notes)


def _holds(repo: Any, name: str) -> bool:
    files = () if repo is None else (file for revision in repo.revisions for file in revision.files)
    return any(file.file_name == name for file in files)
