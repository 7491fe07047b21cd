"""Products padded to a size from which on a CPU rounds each row alike, whatever stands beside it.

Found by trying shapes (`tests/bridge/test_steady.py`): the library beneath chooses its code, and with it the
order of the sums, by how many rows there are and how long they are.
"""

from __future__ import annotations

from functools import cache
from typing import Any

import jax.numpy as jnp
from jaxtyping import Array

from torch_dflash.storage.machine import instructions

HALVES = (jnp.bfloat16, jnp.float16)


def fewest_rows(dtype: Any, otherwise: int = 2) -> int:
    """From how many rows on a product in this type rounds a row alike on this CPU, whatever their number.

    A product of one row has an order of its own. With AMX, halves have another one up to five rows, which
    take no less time than eight. ``otherwise``: what holds for other types, whose sums may be exact.
    """
    if dtype not in HALVES:
        return otherwise
    return 8 if _has_tiles() else 2


def fewest_summands(dtype: Any) -> int:
    """How long the rows of such a product are at least: with AMX, shorter ones have many orders."""
    return 32 if dtype in HALVES and _has_tiles() else 0


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
