"""Whether a pair fits its devices, told before anything is put there."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import jax

LARGE = 10**7


def bytes_of(tree: Any) -> int:
    """Of all arrays, or shapes, of ``tree``."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def limit_of(device: Any) -> int | None:
    """Bytes of a device's memory that JAX may use; None: it does not tell, as CPUs do not."""
    return (device.memory_stats() or {}).get("bytes_limit")


def room_of(devices: Iterable[Any]) -> int | None:
    """`limit_of` the smallest of them; other processes' devices are left to these."""
    own = (device for device in devices if device.process_index == jax.process_index())
    return min((limit for limit in map(limit_of, own) if limit is not None), default=None)


def check_room(needed: dict[str, int], room: int | None, remedy: str) -> None:
    """Raise ``ValueError`` if a device shall hold more than it can.

    Programs take some memory besides, which only a compilation tells. What lies there already is not counted,
    for it may be this very model.

    Args:
        needed: bytes on each device, by what they are for.
        room: of `room_of`; None: nothing is known.
        remedy: what to change.
    """
    total = sum(needed.values())
    if room is None or total <= room:
        return
    parts = " and ".join(f"{said(size)} of {name}" for name, size in needed.items())
    whole = f", {said(total)} in all," if len(needed) > 1 else ""
    raise ValueError(
        f"each device would hold {parts}{whole} and has {said(room)}: {said(total - room)} too few; {remedy}."
    )


def said(size: int) -> str:
    """A count of bytes, to be read."""
    return f"{size / 1e9:.2f} GB" if size >= LARGE else f"{size:,} bytes"
