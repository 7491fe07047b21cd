"""Which machine this is."""

from __future__ import annotations

import os
import platform
import zlib
from functools import lru_cache
from pathlib import Path

NARROW = ("amx_bf16", "amx_int8", "avx512_bf16", "avx512_vnni", "avx_vnni")
"""Instructions for products in narrow types, by Linux's names."""
WIDE = ("avx512f", "avx2")


@lru_cache(maxsize=1)
def processor() -> str:
    """How many processors of which kind, and what they multiply with, as in "2 x AMD EPYC, avx2".

    Of rented machines the name may be a whole family's; the instructions say which member is fast at what.
    """
    names, flags = _values("model name"), instructions()
    known = [flag for flag in NARROW if flag in flags] or [flag for flag in WIDE if flag in flags][:1]
    said = f"{len(names) or '?'} x {names[0] if names else platform.processor()}"
    return f"{said}, {' '.join(known)}" if known else said


@lru_cache(maxsize=1)
def fingerprint() -> str:
    """`processor` with what tells machines apart that it calls alike: features, and how many it may use."""
    features = zlib.crc32("".join(_values("flags")[:1]).encode())
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, features {features:08x}, {usable} in use"


def instructions() -> list[str]:
    """What the processor can do, by Linux's names; empty where nothing is known."""
    return " ".join(_values("flags")[:1]).split()


def _values(field: str) -> list[str]:
    """What Linux says of each processor."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    return [line.partition(":")[2].strip() for line in lines if line.partition(":")[0].strip() == field]
