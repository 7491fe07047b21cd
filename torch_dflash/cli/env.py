"""``torch-dflash env``: versions, devices, processor and caches, for a bug report."""

from __future__ import annotations

import json
import platform
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from torch_dflash.cli.command import command, flag
from torch_dflash.cli.errors import one_line
from torch_dflash.cli.outputs import versions
from torch_dflash.storage.folders import cache_root
from torch_dflash.storage.machine import processor


@command(
    "env",
    [flag("--json", help="Print it as JSON.")],
    "Print what a bug report needs: versions, devices, caches.",
)
def run(arguments: SimpleNamespace) -> int:
    """Print the report; returns the exit status."""
    found = _found()
    if arguments.json:
        print(json.dumps(found, indent=1))
        return 0
    for name, value in found.items():
        lines = [f"{key} {text}" for key, text in value.items()] if isinstance(value, dict) else [value]
        lines = lines or ["none"]
        print(f"{name:10}{lines[0]}", *(f"{'':10}{line}" for line in lines[1:]), sep="\n")
    if folders := _own_folders():
        print("\nCaches may be deleted; what is needed is fetched and compiled again:")
        print(*(f"  rm -r {folder}" for folder in folders), sep="\n")
    return 0


def _found() -> dict[str, Any]:
    from huggingface_hub.constants import HF_HUB_CACHE

    folders = [path for path in (*_own_folders(), Path(HF_HUB_CACHE)) if path.is_dir()]
    return {
        "python": f"{platform.python_version()}, {platform.platform()}",
        "packages": {name: version or "none" for name, version in versions().items()},
        "cpu": processor(),
        "jax": _jax(),
        "torch": _torch(),
        "caches": {str(folder): _size(folder) for folder in folders},
    }


def _own_folders() -> list[Path]:
    """The folders that only this library fills."""
    return sorted(path for path in cache_root().glob("*") if path.is_dir() and path.name[0] != ".")


def _size(folder: Path) -> str:
    files = (path for path in folder.rglob("*") if path.is_file() and not path.is_symlink())
    return f"{sum(path.stat().st_size for path in files) / 1e6:,.1f} MB"


def _jax() -> str:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            import jax_bridge  # noqa: F401 - the door to JAX; it says which versions work together

            return ", ".join(f"{one.platform} {one.device_kind}" for one in sys.modules["jax"].devices())
    except (ImportError, RuntimeError) as error:
        return f"none: {one_line(error)}"


def _torch() -> str:
    try:
        import torch
    except ImportError as error:
        return f"none: {one_line(error)}"
    names = [torch.cuda.get_device_name(at) for at in range(torch.cuda.device_count())]
    return ", ".join(["cpu", *names]) + f"; {torch.get_num_threads()} threads"
