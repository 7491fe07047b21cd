"""Collectives that the chips of a slice run in a step: kinds, shapes, bytes, and the least time they take."""

from __future__ import annotations

import re
from collections import Counter
from typing import NamedTuple

from jax_bridge.aot.hlo import COLLECTIVES, Instruction, Program, array_bytes

RATES = {"v4": 300e9, "v5e": 200e9, "v5p": 600e9, "v6e": 448e9}
"""Published bytes/s between one chip and all its neighbours together."""


class Exchange(NamedTuple):
    """``count`` collectives of one kind; ``bytes``: of each result on one chip. A loop's body counts once."""

    kind: str
    shape: str
    bytes: int
    count: int


def exchanges(program: Program) -> list[Exchange]:
    """All collectives of a program, those of most bytes together first."""
    found = Counter(_described(one) for one in program.instructions() if _kind(one) in COLLECTIVES)
    listed = [Exchange(*what, count) for what, count in found.items()]
    return sorted(listed, key=lambda one: (-one.bytes * one.count, one))


def least_seconds(found: list[Exchange], chips: int, topology: str) -> float | None:
    """What they take if only bytes count, in rings over all links at once; None: no published rate.

    An estimate from below: a small exchange takes microseconds whatever its size, and one may go on behind
    other work.
    """
    rate = RATES.get(topology.partition(":")[0])
    passes = {"all-reduce": 2}
    moved = sum(passes.get(one.kind, 1) * one.bytes * one.count for one in found)
    return None if rate is None else moved * (chips - 1) / chips / rate


def _kind(one: Instruction) -> str:
    return one.op.removesuffix("-start")


def _described(one: Instruction) -> tuple[str, str, int]:
    """(Kind, the largest array of its result, that array's bytes): of a start the result stands last."""
    arrays = re.findall(r"\b\w+\[[\d,]*\]", one.type)
    sizes = [size for size, _ in array_bytes(one.type)]
    at = sizes.index(max(sizes))
    return _kind(one), arrays[at], sizes[at]
