"""Loads the published drafters in the hub's cache and compares them with their rows."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import CacheNotFound, scan_cache_dir, try_to_load_from_cache
from huggingface_hub.constants import HF_HUB_CACHE

from torch_dflash.proposers.checkpoints import load_drafter
from torch_dflash.published.rows import Checkpoint

COMPARED = ("num_hidden_layers", "block_size", "target_layer_ids", "num_target_layers", "mask_token_id")
"""Fields of a drafter's config to compare with the row."""


@dataclass(frozen=True)
class Checked:
    """The result for one pair.

    Attributes:
        name: the pair's. cached: whether the cache holds at least a part of the drafter.
        problem: the reason if the drafter does not load or fit; None: no problem, or not cached.
        compared: whether the target's config was in the cache, to compare the drafter with.
        notes: differences from the row, unusual fields, and missing comparisons.
    """

    name: str
    cached: bool
    problem: str | None = None
    compared: bool = False
    notes: list[str] = field(default_factory=list)


def check_cached(rows: Iterable[Checkpoint], cache_dir: str | Path | None = None) -> list[Checked]:
    """Load each drafter in the hub's cache and compare its config with the target's; fetches nothing.

    Args:
        rows: the pairs. cache_dir: folder of a cache; unset: huggingface_hub's own.

    Raises:
        OSError: there is no such cache.
    """
    try:
        faults = [str(fault) for fault in scan_cache_dir(cache_dir).warnings]
    except (CacheNotFound, ValueError) as error:  # ValueError: the path is a file
        raise OSError(f"no hub cache could be read ({error}); fetch a drafter or name another.") from error
    return [_checked(row, faults, Path(cache_dir or HF_HUB_CACHE)) for row in rows]


def _checked(row: Checkpoint, faults: list[str], cache: Path) -> Checked:
    folder = f"models--{str(row.drafter).replace('/', '--')}"
    if row.drafter is None or not (cache / folder).exists():
        return Checked(row.name, False)
    damaged = next((fault for fault in faults if folder in re.split(r"[^\w.-]+", fault)), None)
    notes = [] if damaged is None else [f"{cache / folder} is damaged ({damaged}); fetch it again."]
    named = str(row.target)
    target = named if isinstance(try_to_load_from_cache(named, "config.json", cache), str) else None
    if target is None:
        model = row.target or row.model
        notes.append(f"the config of {model} is not in the cache: the pair was not compared.")
    options: dict[str, Any] = {"local_files_only": True, "cache_dir": cache}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            config = load_drafter(str(row.drafter), target, **options).config
        except Exception as error:  # a damaged file may raise anything; the other pairs are still checked
            problem = " ".join(str(error).split()) or type(error).__name__
            return Checked(row.name, True, problem, target is not None, notes)
    notes += [str(one.message) for one in caught if str(one.message).startswith("note: ")]
    for name in COMPARED:
        published, own = getattr(row, name), getattr(config, name)
        own = tuple(own) if isinstance(published, tuple) else own
        if published is not None and own is not None and published != own:
            notes.append(f"{name}={own} in its config, {published} by {row.sources[name]}.")
    return Checked(row.name, True, None, target is not None, notes)
