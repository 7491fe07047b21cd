"""Sets of tokens as bits: 32 ids in an integer, the lowest bit first."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

ALL = np.int32(-1)
"""32 ids, each in the set."""


def words_of(vocab_size: int) -> int:
    """Integers that hold so many ids."""
    return -(-vocab_size // 32)


def put(bits: np.ndarray, ids: Iterable[int], value: bool) -> None:
    """Take ids into each set of ``bits`` [..., words], or out of it, in place."""
    for token in ids:
        if 0 <= token < 32 * bits.shape[-1]:
            bit = np.array(1 << token % 32, np.uint32).view(np.int32)
            word = bits[..., token // 32]
            bits[..., token // 32] = word | bit if value else word & ~bit


def holds(bits: np.ndarray, token: int) -> bool:
    """Whether a token is in the set ``bits`` [words]."""
    return 0 <= token < 32 * len(bits) and bool(bits[token // 32] >> (token % 32) & 1)


def packed(flags: np.ndarray) -> np.ndarray:
    """Bools [..., ids] as bits [..., words]."""
    spare = -flags.shape[-1] % 32
    whole = np.pad(flags, [(0, 0)] * (flags.ndim - 1) + [(0, spare)])
    return np.ascontiguousarray(np.packbits(whole, axis=-1, bitorder="little")).view(np.int32)
