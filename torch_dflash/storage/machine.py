"""Names of this machine and its processors."""

from __future__ import annotations

import os
import platform
import zlib
from functools import lru_cache
from pathlib import Path

NARROW = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni")
"""Instructions for products in narrow types, in Linux's names."""
WIDE = ("avx512f", "avx2")


@lru_cache(maxsize=1)
def processor() -> str:
    """Number, name and product instructions of the processors, as in "2 x AMD EPYC, avx2".

    Rented machines may have a family's name; the instructions tell its members apart.
    """
    names, flags = _values("model name"), instructions()
    known = [flag for flag in NARROW if flag in flags] or [flag for flag in WIDE if flag in flags][:1]
    text = f"{len(names) or '?'} x {names[0] if names else platform.processor()}"
    return f"{text}, {' '.join(known)}" if known else text


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """`processor` with a checksum of all features, and the number of usable processors."""
    features = zlib.crc32("".join(_values("flags")[:1]).encode())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, features {features:08x}, {usable} in use"


def instructions() -> list[str]:
    """The processor's features in Linux's names; empty if unknown."""
    return " ".join(_values("flags")[:1]).split()


def _values(field: str) -> list[str]:
    """A field of Linux's /proc/cpuinfo, for each processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field]
