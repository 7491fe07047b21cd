"""The cache folder of this library."""

from __future__ import annotations

import os
import sys
from pathlib import Path


def cache_root() -> Path:
    """The folder for caches, by the platform's convention."""
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME", ""))
        if not base.is_absolute():  # the XDG specification says to ignore relative paths
            base = Path.home() / ".cache"
    return base / "torch-dflash"
