"""Halves of the first axis of the kernels' grids, one for each of a chip's two cores."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jax_bridge.kernels.online_softmax import LOWEST


class Halves(NamedTuple):
    """A call of ``batch`` sequences and ``groups`` K/V heads; one of the last three fields is 2.

    Each page is read by one half; a dense context of one block is fetched by both and used by one. Halves of
    the ``keys`` have a result each, which `jax_bridge.kernels.online_softmax.joined` combines; the second has
    the new rows.
    """

    batch: int
    groups: int
    heads: int = 1
    sequences: int = 1
    keys: int = 1

    @classmethod
    def of(cls, batch: int, groups: int) -> Halves:
        """Halves of the K/V heads if their number is even, else of sequences if theirs is, else of keys.

        Keys only on a chip with two cores: on one core, their halves would only add a second result.
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
        """`place` in results and their initial values, where each half of the keys has its own heads."""
        return self.place(half, b) if self.sequences == 2 else (b, half)

    def begin(self, first: Any) -> Any:
        """``first`` [G, ...] of `SoftmaxRefs.begin` by `result`: one half of the keys has the sinks."""
        return jnp.concatenate([jnp.full_like(first, LOWEST), first]) if self.keys == 2 else first

    def has_new(self, half: Any) -> Any:
        """The condition that a half attends to the new rows."""
        return half == 1 if self.keys == 2 else True

    def writes(self, half: Any, tile: Any) -> Any:
        """The condition that a program writes the new rows: the first tile of the half with them."""
        return (tile == 0) & (half == 1) if self.keys == 2 else tile == 0

    def blocks(self, half: Any, begin: Any, end: Any) -> tuple[Any, Any]:
        """A half's range of the key blocks ``begin .. end-1``.

        The second has the odd one, and so the last, where new rows may be written meanwhile.
        """
        if self.keys == 1:
            return begin, end
        middle = begin + jax.lax.div(end - begin, 2)
        return jnp.where(half == 0, begin, middle), jnp.where(half == 0, middle, end)


def has_two_cores() -> bool:
    """Whether the chips traced for have two cores each that act as one device; known only on a slice."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device is not None and device.num_cores == 2
