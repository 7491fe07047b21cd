"""Pads products to sizes at which a CPU rounds each row alike, whatever the other rows are.

The sizes were found by trying shapes (`tests/bridge/test_row_reductions.py`): the library beneath chooses its
code, and so the order of the sums, by the number of rows and by their length.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from torch_dflash.storage.machine import instructions

HALVES = (jnp.bfloat16, jnp.float16)
TILE = 32
"""Half-precision numbers in a row of an AMX tile."""
EIGHT = 8
"""Rows that fill AMX tiles without a rest."""
OUTPUTS = 4
"""Fewest entries of a result's row. With fewer, as of a gate, the order of the sums depends on the number of
rows on some CPUs."""


def enough_rows(dtype: Any, count: int, least: int = 2) -> int:
    """Rows of a padded product of ``count`` rows in this type, so that this CPU rounds each row alike.

    A product of one row has its own order. With AMX, so have few rows of halves and a rest of its tiles;
    whole eights have not, and take no longer. ``least``: rows of other types, whose sums may be exact.
    """
    if dtype not in HALVES:
        return max(count, least)
    return -(-count // EIGHT) * EIGHT if _has_tiles() else max(count, 2)


def whole_tiles(dtype: Any, size: int) -> int:
    """Length of the padded rows of ``size`` entries: with AMX, whole tiles have one order."""
    return -(-size // TILE) * TILE if dtype in HALVES and _has_tiles() else size


def enlarged(array: Array, axis: int, least: int) -> Array:
    """``array``, padded with zeros to ``least`` entries along ``axis``."""
    missing = max(least - array.shape[axis], 0)
    if not missing:
        return array
    sizes = [(0, 0)] * array.ndim
    sizes[axis] = (0, missing)
    return jnp.pad(array, sizes)


@cache
def _has_tiles() -> bool:
    return "amx_bf16" in instructions()
