"""Formats of weights that are cut over a mesh, and their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from math import gcd
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_bridge.mesh.shape import ALL
from jax_bridge.weights.codes import Blocks, InCodes, Scaled
from jax_bridge.weights.formats import Halved, OfOneArray, plain
from torch_dflash.ops.latents import Widths

COLUMN, ROW, GATHER, EXPERTS, BLOCKS, HEADS = "column", "row", "gather", "experts", "blocks", "heads"


class Partition(NamedTuple):
    """The cut of a weight over a mesh, and the exchange of its product.

    ``kind``: "column" (outputs stay on their chips), "row" (inputs are cut, outputs are summed), "gather"
    (outputs are gathered), "experts" (each chip has some experts), "blocks" (`InBlocks` of ``blocks``),
    "heads" (`Halved` of ``widths``); None: no product uses the weight alone.
    """

    mesh: Mesh
    spec: PartitionSpec = PartitionSpec()
    kind: str | None = None
    blocks: tuple[int, ...] = ()
    widths: Widths | None = None

    @property
    def place(self) -> NamedSharding:
        """The sharding of the weight's array."""
        return NamedSharding(self.mesh, self.spec)

    def of_blocks(self, size: int, shape: tuple[int, ...]) -> Partition:
        """This partition; whole where it would part blocks of ``size`` inputs that share a scale."""
        return Partition(self.mesh) if self.place.shard_shape(shape)[-1] % size else self

    def unit(self, shape: tuple[int, ...]) -> int:
        """Outputs of which each chip's rows begin at a multiple; 0: they are not cut."""
        if self.blocks:
            return gcd(*self.blocks) // self.mesh.size
        return own if (own := self.place.shard_shape(shape)[0]) < shape[0] else 0

    def rows_of(self, chip: slice) -> list[slice]:
        """A chip's rows in the model's order, by its part of an array."""
        if not self.blocks:
            return [chip]
        at, size = chip.start // (sum(self.blocks) // self.mesh.size), self.mesh.size
        firsts = [end - block for end, block in zip(accumulate(self.blocks), self.blocks, strict=True)]
        shares = [block // size for block in self.blocks]
        return [
            slice(first + at * own, first + (at + 1) * own) for first, own in zip(firsts, shares, strict=True)
        ]

    def on_parts(self, local: Callable, given: Any, made: Any) -> Callable:
        """``local`` on each chip's part; ``given``, ``made``: specs of its arguments and results."""
        return jax.shard_map(local, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["partition"])
@dataclass(frozen=True, eq=False)
class Cut(OfOneArray):
    """A `jax_bridge.weights.formats.StoredWeight` whose products state their exchanges."""

    array: Any  # a jax.Array over the mesh, codes and scales, or what JAX puts in its place while it traces
    partition: Partition

    def look_up(self, ids: Int[Array, "*R"]) -> Float[Array, "*R H"]:
        """Rows of a table [V, H] that is cut over the vocabulary, each from its chip."""

        def local(table: Any, ids: Array) -> Array:
            count = table.shape[0]
            at = ids - jax.lax.axis_index(ALL) * count
            near = jnp.clip(at, 0, count - 1)
            rows = table.look_up(near) if isinstance(table, Scaled) else jnp.take(table, near, axis=0)
            own = ((at >= 0) & (at < count))[..., None]
            return jax.lax.psum(jnp.where(own, rows, 0), ALL)

        whole = PartitionSpec()
        given = specs_of(self.array, self.partition), whole
        return self.partition.on_parts(local, given, whole)(self.array, ids)


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["partition"])
@dataclass(frozen=True, eq=False)
class InBlocks(OfOneArray):
    """A `jax_bridge.weights.formats.StoredWeight` of blocks of rows, each cut over all chips.

    ``array`` has the rows chip by chip, so a chip's rows of all ``partition.blocks`` are adjacent.
    """

    array: Any
    partition: Partition

    def unwrap(self) -> jax.Array:
        """The rows in the model's order."""
        return plain(self.in_order())

    def in_order(self) -> Any:
        """``array`` with its rows in the model's order."""
        chips = self.partition.mesh.size

        def together(rows: Array, ends: list[int]) -> Array:
            parts = rows.reshape(chips, -1, *rows.shape[1:])
            blocks = jnp.split(parts, [end // chips for end in ends], axis=1)
            return jnp.concatenate([block.reshape(-1, *rows.shape[1:]) for block in blocks])

        return _by_rows(together, self.array, self.partition)


def chip_by_chip(weight: Any, partition: Partition) -> Any:
    """The ``array`` of `InBlocks` from a weight with its rows in the model's order."""
    chips = partition.mesh.size

    def apart(rows: Array, ends: list[int]) -> Array:
        parts = [block.reshape(chips, -1, *rows.shape[1:]) for block in jnp.split(rows, ends)]
        return jnp.concatenate(parts, axis=1).reshape(rows.shape)

    return _by_rows(apart, weight, partition)


def _by_rows(function: Callable, weight: Any, partition: Partition) -> Any:
    """`function(rows, ends)` of each array: its rows first, and the ends of blocks but the last."""

    def apply(spec: PartitionSpec, leaf: Array) -> Array:
        axis = [*spec].index(ALL)
        rows = sum(partition.blocks) // leaf.shape[axis]  # of the model, in one of the leaf's: a scale's
        ends = [end // rows for end in accumulate(partition.blocks)][:-1]
        return jnp.moveaxis(function(jnp.moveaxis(leaf, axis, 0), ends), 0, axis)

    return jax.tree.map(apply, specs_of(weight, partition), weight)


def in_format(array: Any, partition: Partition) -> Any:
    """The format of an array that is cut by ``partition``; `Halved` is its own."""
    if partition.kind in (None, HEADS):
        return array
    return InBlocks(array, partition) if partition.kind == BLOCKS else Cut(array, partition)


def specs_of(weight: Any, partition: Partition) -> Any:
    """The spec of each array of a weight that is cut by ``partition``."""
    if isinstance(weight, Halved):
        return Halved(partition.spec, partition.spec)
    return weight.specs(partition.spec) if isinstance(weight, InCodes) else partition.spec


def fitting(weight: Any, partition: Partition) -> Partition:
    """``partition``; whole where it would part blocks of inputs that share a scale."""
    blocks = isinstance(weight, Blocks)
    return partition.of_blocks(weight.array.shape[1], weight.shape) if blocks else partition


def fitted(weight: Any, partition: Partition) -> Any:
    """A weight in blocks that each lie on one chip of its `fitting` partition: smaller, with equal scales."""
    return weight.finer(partition.unit(weight.shape)) if isinstance(weight, Blocks) else weight
