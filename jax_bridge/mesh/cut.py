"""Formats of weights that are cut over a mesh, and their products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float, Int

from jax_bridge.mesh.shape import ALL
from jax_bridge.weights.formats import OfOneArray

COLUMN, ROW, GATHER, EXPERTS, BLOCKS, HEADS = "column", "row", "gather", "experts", "blocks", "heads"


class Partition(NamedTuple):
    """The cut of a weight over a mesh, and the exchange of its product.

    ``kind``: "column" (outputs stay on their chips), "row" (inputs are cut, outputs are summed), "gather"
    (outputs are gathered), "experts" (each chip has some experts), "blocks" (`InBlocks` of ``blocks``),
    "heads" (`Halved` by ``blocks``, its widths); None: no product uses the weight alone.
    """

    mesh: Mesh
    spec: PartitionSpec = PartitionSpec()
    kind: str | None = None
    blocks: tuple[int, ...] = ()

    @property
    def place(self) -> NamedSharding:
        """The sharding of the weight's array."""
        return NamedSharding(self.mesh, self.spec)

    def on_parts(self, local: Callable, given: Any, made: Any) -> Callable:
        """``local`` on each chip's part; ``given``, ``made``: specs of its arguments and results."""
        return jax.shard_map(local, mesh=self.mesh, in_specs=given, out_specs=made, check_vma=False)


@partial(jax.tree_util.register_dataclass, data_fields=["array"], meta_fields=["partition"])
@dataclass(frozen=True, eq=False)
class Cut(OfOneArray):
    """A `jax_bridge.weights.formats.StoredWeight` whose products state their exchanges."""

    array: Any  # a jax.Array over the mesh, or what JAX puts in its place while it traces
    partition: Partition

    def look_up(self, ids: Int[Array, "*R"]) -> Float[Array, "*R H"]:
        """Rows of a table [V, H] that is cut over the vocabulary, each from its chip."""

        def local(table: Array, ids: Array) -> Array:
            count = table.shape[0]
            at = ids - jax.lax.axis_index(ALL) * count
            rows = jnp.take(table, jnp.clip(at, 0, count - 1), axis=0)
            own = ((at >= 0) & (at < count))[..., None]
            return jax.lax.psum(jnp.where(own, rows, 0), ALL)

        whole = PartitionSpec()
        return self.partition.on_parts(local, (self.partition.spec, whole), whole)(self.array, ids)


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
        rows = self.array.reshape(self.partition.mesh.size, -1, *self.shape[1:])
        blocks = jnp.split(rows, [end // len(rows) for end in accumulate(self.partition.blocks)][:-1], axis=1)
        return jnp.concatenate([block.reshape(-1, *self.shape[1:]) for block in blocks])


def chip_by_chip(rows: jax.Array, partition: Partition) -> jax.Array:
    """The ``array`` of `InBlocks` from rows in the model's order."""
    chips, blocks = partition.mesh.size, jnp.split(rows, [*accumulate(partition.blocks)][:-1])
    parts = [block.reshape(chips, -1, *rows.shape[1:]) for block in blocks]
    return jnp.concatenate(parts, axis=1).reshape(rows.shape)


def rows_of_chip(chip: slice, partition: Partition) -> list[slice]:
    """A chip's rows in the model's order, by its part of ``array``."""
    at, size = divmod(chip.start, sum(partition.blocks) // partition.mesh.size)[0], partition.mesh.size
    shares = [block // size for block in partition.blocks]
    firsts = [end - block for end, block in zip(accumulate(partition.blocks), partition.blocks, strict=True)]
    return [
        slice(first + at * own, first + (at + 1) * own) for first, own in zip(firsts, shares, strict=True)
    ]


def in_format(array: Any, partition: Partition) -> Any:
    """The format of an array that is cut by ``partition``; `Halved` is its own."""
    if partition.kind in (None, HEADS):
        return array
    return InBlocks(array, partition) if partition.kind == BLOCKS else Cut(array, partition)
