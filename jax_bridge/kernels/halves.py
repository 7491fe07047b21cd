"""Halves of the first axis of the kernels' grids, one for each of a chip's two cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_bridge.kernels.online_softmax import LOWEST


class Halves(NamedTuple):
    """A call of ``batch`` sequences and ``groups`` K/V heads, and which of three things comes in two parts.

    Every page is read by one half alone; a dense context of one block is fetched by both, attended to by one.
    Halves of the ``keys`` give a result each, put together by `jax_bridge.kernels.online_softmax.joined`; the
    second has the new rows.
    """

    batch: int
    groups: int
    heads: int = 1
    sequences: int = 1
    keys: int = 1

    @classmethod
    def of(cls, batch: int, groups: int) -> Halves:
        """K/V heads if their number is even, else sequences if theirs is, else keys.

        Keys on a chip with two cores alone: on one, a second result is all that halves of them would bring.
        """
        if groups % 2 == 0:
            return cls(batch, groups, heads=2)
        if batch % 2 == 0:
            return cls(batch, groups, sequences=2)
        return cls(batch, groups, keys=2 if has_two_cores() else 1)

    @property
    def grid(self) -> tuple[int, int]:
        """Halves, and sequences of each."""
        return self.heads * self.sequences * self.keys, self.batch // self.sequences

    @property
    def own(self) -> int:
        """K/V heads of a half."""
        return self.groups // self.heads

    def place(self, half: Any, b: Any) -> tuple[Any, Any]:
        """(Sequence, block of ``own`` K/V heads) of a half's sequence ``b``."""
        if self.sequences == 2:
            return half * self.grid[1] + b, 0
        return b, 0 if self.keys == 2 else half

    def result(self, half: Any, b: Any) -> tuple[Any, Any]:
        """`place` where each half of the keys has heads of its own: in results and what they begin with."""
        return self.place(half, b) if self.sequences == 2 else (b, half)

    def begin(self, first: Any) -> Any:
        """``first`` [G, ...] of `Running.begin`, as `result` finds it: one half of the keys has the sinks."""
        return jnp.concatenate([jnp.full_like(first, LOWEST), first]) if self.keys == 2 else first

    def has_new(self, half: Any) -> Any:
        """Whether a half attends to the new rows."""
        return half == 1 if self.keys == 2 else True

    def writes(self, half: Any, tile: Any) -> Any:
        """Whether a program merges and writes the new rows: the first tile of the half that has them."""
        return (tile == 0) & (half == 1) if self.keys == 2 else tile == 0

    def blocks(self, half: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """A half's blocks of keys, of ``begin .. end-1``.

        The second has the odd one, so it always has the last, in which new rows may be written meanwhile.
        """
        if self.keys == 1:
            return begin, end
        middle = begin + jax.lax.div(end - begin, 2)
        return jnp.where(half == 0, begin, middle), jnp.where(half == 0, middle, end)


def has_two_cores() -> bool:
    """Whether the chips traced for have two cores each that act as one device; known on a slice alone."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.num_cores == 2
