"""Bytes of an array on a TPU: its compiler lays arrays in tiles, and the last ones are filled up."""

from __future__ import annotations

import re
from math import prod
from typing import Any

import jax

from jax_bridge.aot.hlo import Program, all_bytes
from jax_bridge.room import bytes_of

_LAYOUT = re.compile(r"^\w+\[([\d,]*)\](?:\{([\d,]*)(?::(?:[^T]*)T\(([\d,]*)\))?)?")


def laid_bytes(kind: str) -> int:
    """Bytes of an array of an HLO type, tiles filled up: ``bf16[2880,4]{0,1:T(8,128)}`` has 8 by 2944."""
    match = _LAYOUT.match(kind)
    if match is None:
        raise ValueError(f"{kind!r} is no array of an HLO program.")
    shape, order, tile = ([int(one) for one in (part or "").split(",") if one] for part in match.groups())
    laid = list(shape)
    for axis, length in zip(order, reversed(tile), strict=False):  # both from the innermost on
        laid[axis] = -(-shape[axis] // length) * length
    return all_bytes(kind) * prod(laid) // max(1, prod(shape))


class Laid:
    """How the compiler fills up the arguments of a program, and so arrays like them.

    Args:
        hlo: a scheduled program.
        arguments: its arguments as shapes of one chip's parts, in the program's order.
    """

    def __init__(self, hlo: str, arguments: Any):
        body = Program(hlo).computations["ENTRY"].values()
        sizes = {one.index: laid_bytes(one.type) for one in body if one.op == "parameter"}
        leaves = jax.tree.leaves(arguments)
        self.total = sum(sizes.values())
        self._exact = {(leaf.shape, leaf.dtype): sizes[at] for at, leaf in enumerate(leaves)}
        # By the innermost axis, which is most of what is filled up.
        self._ratios = {_kind(leaf): sizes[at] / max(1, bytes_of(leaf)) for at, leaf in enumerate(leaves)}
        self._usual = self.total / max(1, bytes_of(leaves))

    def of(self, tree: Any) -> int:
        """Bytes of shapes on a chip; of those that the program had not, as of those most like them."""
        return sum(map(self._size, jax.tree.leaves(tree)))

    def _size(self, leaf: Any) -> int:
        exact = self._exact.get((leaf.shape, leaf.dtype))
        return round(bytes_of(leaf) * self._ratios.get(_kind(leaf), self._usual)) if exact is None else exact


class Unfilled:
    """Where nothing was compiled: arrays take what they hold."""

    def of(self, tree: Any) -> int:
        """Bytes of shapes."""
        return bytes_of(tree)


def _kind(leaf: Any) -> tuple:
    return len(leaf.shape), leaf.shape[-1:], leaf.dtype
