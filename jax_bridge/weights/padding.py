"""Products padded to a size from which on a CPU rounds each row alike, whatever stands beside it.

Found by trying shapes (`tests/bridge/test_row_reductions.py`): the library beneath chooses its code, and with
it the order of the sums, by how many rows there are and how long they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from torch_dflash.storage.machine import instructions

HALVES = (jnp.bfloat16, jnp.float16)
TILE = 32
"""Halves in a row of one of AMX's tiles."""
EIGHT = 8
"""Rows that its tiles leave nothing over of."""
OUTPUTS = 4
"""Entries of a row of the result. With fewer, as of a gate, the order of the sums depends on how many rows
there are on some CPUs."""


def enough_rows(dtype: Any, count: int, least: int = 2) -> int:
    """How many rows a product of ``count`` rows in this type has, so that this CPU rounds each of them alike.

    A product of one row has an order of its own. With AMX, so have halves of few rows, and what its
    tiles leave over: whole eights have not, and take no longer. ``least``: of other types, whose sums may be
    exact.
    """
    if dtype not in HALVES:
        return max(count, least)
    return -(-count // EIGHT) * EIGHT if _has_tiles() else max(count, 2)


def whole_tiles(dtype: Any, size: int) -> int:
    """How long the rows of such a product are, of ``size`` entries: with AMX, whole tiles have one order."""
    return -(-size // TILE) * TILE if dtype in HALVES and _has_tiles() else size


def enlarged(array: Array, axis: int, least: int) -> Array:
    """``array`` with zeros behind it along ``axis``, where it has fewer entries there than ``least``."""
    missing = max(least - array.shape[axis], 0)
    if not missing:
        return array
    sizes = [(0, 0)] * array.ndim
    sizes[axis] = (0, missing)
    return jnp.pad(array, sizes)


@cache
def _has_tiles() -> bool:
    return "amx_bf16" in instructions()
