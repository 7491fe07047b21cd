"""Which machine this is."""

from __future__ import annotations

import os
import platform
import zlib
from functools import lru_cache
from pathlib import Path


@lru_cache(maxsize=1)
def processor() -> str:
    """How many processors of which kind, as in "2 x AMD EPYC 7B13"."""
    names = _values("model name")
    return f"{len(names) or '?'} x {names[0] if names else platform.processor()}"


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """`processor` with what tells machines apart that it calls alike: features, and how many it may use."""
    features = zlib.crc32("".join(_values("flags")[:1]).encode())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, features {features:08x}, {usable} in use"


def _values(field: str) -> list[str]:
    """What Linux says of each processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field]
