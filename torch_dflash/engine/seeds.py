"""From a user's seed to one key per row."""

from __future__ import annotations

from typing import Any

import torch

from torch_dflash.checks import check_rows, is_count, row_list


def drawn_seed() -> int:
    """A seed from torch's generator: ``torch.manual_seed`` rules, as everywhere in transformers."""
    return int(torch.randint(0, 2**31 - 1, (1,), device="cpu").item())


def row_seeds(seed: Any, rows: int) -> list[int]:
    """One seed per row; a single one is counted up, for rows of a batch must not share their noise.

    Raises:
        ValueError: not an integer of 64 bits, or not one per row.
    """
    given = row_list(drawn_seed() if seed is None else seed)
    seeds = given if isinstance(given, list) else [given]
    for value in seeds:
        if not is_count(value):
            raise ValueError(f"seed={value!r}: must be an integer, or one integer per row.")
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"seed={value}: must lie in [-2**63, 2**64); take it modulo 2**64.")
    if isinstance(given, list):
        return [int(value) for value in check_rows("seed", given, rows)]
    return [int(given) + row for row in range(rows)]


def seed_key(seed: int) -> int:
    """The 32-bit key, unsigned, of a seed taken modulo 2**64 (so -1 is the seed 2**64 - 1).

    The low word, offset by 32 bits of the high word's splitmix64 finaliser (Steele et al. 2014): seeds that
    share their high word, as the rows of a batch do, never share a key; any other two do so by chance, one
    time in 2**32. The finaliser maps 0 to 0, so a seed below 2**32 is its own key; `sampling.noise_bits`
    does the rest of the mixing.
    """
    word = 2**64 - 1
    low, high = seed & 0xFFFFFFFF, (seed & word) >> 32
    high = (high ^ (high >> 30)) * 0xBF58476D1CE4E5B9 & word
    high = (high ^ (high >> 27)) * 0x94D049BB133111EB & word
    return low ^ ((high ^ (high >> 31)) & 0xFFFFFFFF)
