"""JSON files that say where their figures came from."""

from __future__ import annotations

import datetime
import json
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from torch_dflash.storage.machine import processor

LOAD = getattr(os, "getloadavg", lambda: (None,))()[0]
"""Of the machine, the minute before this process measured anything; None: the system does not tell."""
PACKAGES = ("torch-dflash", "torch", "torchax", "jax", "jaxlib", "transformers")


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


def write_json(path: str, results: dict) -> None:
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
    jax = sys.modules.get("jax")  # only if this process decodes with it
    if jax is not None and jax.devices()[0].platform != "cpu":
        return f"{len(jax.devices())} x {jax.devices()[0].device_kind}"
    if torch.cuda.is_initialized():
        return f"{torch.cuda.get_device_name()}; CPU: {processor()}"
    return f"CPU: {processor()}"
