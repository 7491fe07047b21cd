"""Checks that weights and state fit in device memory before allocating."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

LARGE = 10**7


def bytes_of(tree: Any) -> int:
    """Bytes of all arrays, or shapes, of ``tree``."""
    return sum(leaf.size * jax.dtypes.itemsize_bits(leaf.dtype) // 8 for leaf in jax.tree.leaves(tree))


def memory_limit(device: Any) -> int | None:
    """Bytes of a device's memory that JAX may use; None: unknown, as on CPUs."""
    return (device.memory_stats() or {}).get("bytes_limit")


def memory_of(devices: Iterable[Any]) -> int | None:
    """The smallest `memory_limit` of this process's ``devices``; None: unknown."""
    own = (device for device in devices if device.process_index == jax.process_index())
    return min((limit for limit in map(memory_limit, own) if limit is not None), default=None)


def check_memory(needed: dict[str, int], available: int | None, remedy: str) -> None:
    """Raise ``ValueError`` if a device would hold more bytes than it can.

    Temporaries of programs are not counted: only a compilation tells them. Memory in use is not counted
    either: it may hold this very model.

    Args:
        needed: bytes on each device by purpose.
        available: from `memory_of`; None: unknown, and nothing is raised.
        remedy: the change that the message proposes.
    """
    total = sum(needed.values())
    if available is None or total <= available:
        return
    parts = " and ".join(f"{format_bytes(size)} of {name}" for name, size in needed.items())
    whole = f", {format_bytes(total)} in all," if len(needed) > 1 else ""
    lack = format_bytes(total - available)
    raise ValueError(
        f"each device would hold {parts}{whole} and has {format_bytes(available)}: {lack} too few; {remedy}."
    )


def format_bytes(size: int) -> str:
    """GB with two digits, or bytes of a small count."""
    return f"{size / 1e9:.2f} GB" if size >= LARGE else f"{size:,} bytes"
