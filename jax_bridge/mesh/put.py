"""Host values on a mesh: each process puts the parts of its own devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding

from jax_bridge.arrays import row_major, to_numpy
from jax_bridge.mesh.cut import HEADS, Cut, InBlocks, Partition, chip_by_chip, in_format, rows_of_chip
from jax_bridge.weights.formats import Halved, plain
from torch_dflash.ops.latents import Widths, halves

Index = tuple[slice, ...]


def place(read: Callable[[Index], torch.Tensor], shape: tuple[int, ...], partition: Partition) -> Any:
    """A weight on its mesh, in its format; `read` returns a part by its index and is called once for each."""
    parts: dict[Any, np.ndarray] = {}
    if partition.kind == HEADS:
        return _place_halves(read, shape, partition)

    def part(index: Any) -> np.ndarray:
        index = index or ()
        key = tuple((one.start, one.stop) for one in index)
        if key not in parts and partition.blocks:
            pieces = [to_numpy(read((rows, *index[1:]))) for rows in rows_of_chip(index[0], partition)]
            parts[key] = np.concatenate(pieces)
        elif key not in parts:
            parts[key] = to_numpy(read(index))
        return parts[key]

    array = jax.make_array_from_callback(shape, partition.place, part).block_until_ready()
    return in_format(row_major(array), partition)


def _place_halves(read: Callable[[Index], torch.Tensor], shape: tuple[int, ...], partition: Partition) -> Any:
    """The `Halved` weight of latents, each chip with its heads."""
    widths, parts = Widths(*partition.blocks), {}
    size = widths.nope + widths.value

    def part(index: Any, at: int) -> np.ndarray:
        heads = index[0]
        if heads.start not in parts:
            rows = read((slice(heads.start * size, heads.stop * size), slice(None)))
            parts[heads.start] = [to_numpy(half.contiguous()) for half in halves(rows, widths)]
        return parts[heads.start][at]

    arrays = [
        jax.make_array_from_callback(
            (shape[0] // size, width, widths.rank), partition.place, partial(part, at=at)
        ).block_until_ready()
        for at, width in enumerate((widths.nope, widths.value))
    ]
    return Halved(*arrays)


def relocated(weight: Any, where: Partition | Any) -> Any:
    """A weight in its format on another mesh or device; itself, where it lies there already."""
    leaves = jax.tree.leaves(weight)
    if not isinstance(where, Partition):
        if all(leaf.devices() == {where} for leaf in leaves):
            return weight
        whole = _in_models_order(weight)
        return jax.tree.map(lambda leaf: row_major(jax.device_put(leaf, SingleDeviceSharding(where))), whole)
    if all(leaf.sharding == where.place for leaf in leaves):
        return weight
    if where.kind == HEADS:
        return jax.tree.map(lambda leaf: jax.device_put(leaf, where.place), weight)
    array = _in_models_order(weight)
    array = chip_by_chip(plain(array), where) if where.blocks else array
    return in_format(row_major(jax.device_put(array, where.place)), where)


def _in_models_order(weight: Any) -> Any:
    return plain(weight) if isinstance(weight, Cut | InBlocks) else weight


def put(tree: Any, mesh: Mesh) -> Any:
    """Torch tensors and numpy arrays of ``tree`` on every device of ``mesh``, in memory that JAX owns."""
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.tree.map(lambda leaf: put_leaf(leaf, everywhere), tree)


def put_leaf(leaf: Any, where: NamedSharding) -> Any:
    """A leaf of a state or of a request, as an array that may be donated."""
    if isinstance(leaf, jax.Array) and leaf.sharding == where:
        return leaf
    host = to_numpy(leaf) if isinstance(leaf, torch.Tensor) else np.asarray(leaf)
    parts = where.addressable_devices_indices_map(host.shape)
    own = [jax.device_put(host[index or ()], device, may_alias=False) for device, index in parts.items()]
    return jax.make_array_from_single_device_arrays(host.shape, where, own)


def part_of(leaf: Any, where: NamedSharding) -> jax.ShapeDtypeStruct:
    """The shape of one device's part of an array."""
    return jax.ShapeDtypeStruct(where.shard_shape(tuple(leaf.shape)), leaf.dtype)


def whole(tree: Any, mesh: Mesh) -> Any:
    """``tree`` as arrays that this process can read; parts of other processes are gathered one by one."""
    return jax.tree.map(lambda leaf: _read(leaf, mesh), tree)


def _read(leaf: Any, mesh: Mesh) -> Any:
    if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable:
        return leaf
    return leaf.addressable_data(0) if leaf.is_fully_replicated else _gathered(leaf, mesh)


def _gathered(array: jax.Array, mesh: Mesh) -> jax.Array:
    everywhere = NamedSharding(mesh, PartitionSpec())
    return jax.jit(_as_it_is, out_shardings=everywhere)(array).addressable_data(0)


def _as_it_is(array: jax.Array) -> jax.Array:
    return array
