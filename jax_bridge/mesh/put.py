"""Host values on a mesh: each process puts the parts of its own devices."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any

import jax
import numpy as np
import torch
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding

from jax_bridge.arrays import row_major, to_jax, to_numpy
from jax_bridge.mesh.cut import (
    Cut,
    InBlocks,
    Partition,
    chip_by_chip,
    fitted,
    fitting,
    in_format,
    specs_of,
)
from jax_bridge.weights.codes import Scaled, bound_to
from jax_bridge.weights.formats import Halved, by_rows, name_of
from torch_dflash.ops.latents import halves

Index = tuple[slice, ...]


def place(read: Callable[[Index], torch.Tensor], shape: tuple[int, ...], partition: Partition) -> Any:
    """A weight on its mesh, in its format; `read` returns a part by its index and is called once for each."""

    def part(index: Index, device: Any) -> Any:
        if partition.widths:
            return Halved(*to_jax(halves(read(index), partition.widths), device=device))
        if not partition.blocks:
            return to_numpy(read(index))
        return np.concatenate([to_numpy(read((rows, *index[1:]))) for rows in partition.rows_of(index[0])])

    return place_parts(part, shape, partition)


def place_parts(read: Callable[[Index, Any], Any], shape: tuple[int, ...], partition: Partition) -> Any:
    """A weight on its mesh; `read` returns a part in its format, for a device, and is called once for each.

    ``partition`` parts no block of codes (`jax_bridge.mesh.cut.fitting`).
    """
    parts: dict[Any, list[Any]] = {}
    for device, index in partition.place.addressable_devices_indices_map(shape).items():
        key = tuple((one.start, one.stop) for one in index or ())
        known = parts.get(key) or [read(index or (), device)]
        parts[key] = [*known, bound_to(known[0], device)]
    arrays = [array for _, *own in parts.values() for array in own]

    def whole(spec: PartitionSpec, *own: Any) -> jax.Array:
        where, chips = NamedSharding(partition.mesh, spec), partition.mesh.size
        shares = zip(own[0].shape, where.shard_shape((chips,) * own[0].ndim), strict=True)
        size = tuple(length * chips // share for length, share in shares)
        return row_major(jax.make_array_from_single_device_arrays(size, where, [*own])).block_until_ready()

    return in_format(jax.tree.map(whole, specs_of(arrays[0], partition), *arrays), partition)


def place_quantised(
    read: Callable[[Index], torch.Tensor], shape: tuple[int, ...], partition: Partition
) -> Any:
    """A matrix on its mesh in integers of 8 bits (`Scaled`); `read` returns whole rows by their index."""

    @lru_cache(1)
    def quantised(*ends: int) -> tuple[dict[str, torch.Tensor], str]:
        own = torch.cat([read((piece,)) for piece in partition.rows_of(slice(*ends))])
        return by_rows(own), name_of(own.dtype)

    def part(index: Index, device: Any) -> Scaled:
        rows, columns = index
        kept, dtype = quantised(rows.start, rows.stop)
        kept = to_jax(kept | {"array": kept["array"][:, columns]}, device=device)
        return Scaled(table=None, dtype=dtype, **kept)

    return place_parts(part, shape, partition)


def relocated(weight: Any, where: Partition | Any) -> Any:
    """A weight in its format on another mesh or device; itself, where it lies there already."""
    if not isinstance(where, Partition):
        if all(leaf.devices() == {where} for leaf in jax.tree.leaves(weight)):
            return weight
        whole = _in_models_order(weight)
        return jax.tree.map(row_major, bound_to(whole, SingleDeviceSharding(where)))
    where = fitting(held := weight.array if isinstance(weight, Cut | InBlocks) else weight, where)
    places = places_of(held, where)
    if all(jax.tree.leaves(jax.tree.map(lambda leaf, place: leaf.sharding == place, held, places))):
        return weight
    whole = fitted(_in_models_order(weight), where)
    whole = chip_by_chip(whole, where) if where.blocks else whole
    moved = jax.tree.map(bound_to, whole, places_of(whole, where))
    return in_format(jax.tree.map(row_major, moved), where)


def _in_models_order(weight: Any) -> Any:
    if isinstance(weight, InBlocks):
        return weight.in_order()
    return weight.array if isinstance(weight, Cut) else weight


def places_of(weight: Any, partition: Partition) -> Any:
    """The sharding of each array of a weight that is cut by ``partition``."""
    return jax.tree.map(lambda spec: NamedSharding(partition.mesh, spec), specs_of(weight, partition))


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


def part_of(leaf: Any, where: Sharding) -> jax.ShapeDtypeStruct:
    """The shape of one device's part of an array."""
    return jax.ShapeDtypeStruct(where.shard_shape(tuple(leaf.shape)), leaf.dtype)


def held_of(tree: Any) -> Any:
    """The shapes of arrays' parts on one of their devices."""
    return jax.tree.map(lambda leaf: part_of(leaf, leaf.sharding), tree)


def fit_shapes(weight: Any, partition: Partition) -> tuple[Any, Partition]:
    """Shapes of a weight and its partition, with no block of codes on two chips."""
    partition = fitting(weight, partition)
    return jax.eval_shape(partial(fitted, partition=partition), weight), partition


def share_of(weight: Any, partition: Partition) -> Any:
    """The shapes of one device's part of a weight, by its shapes."""
    weight, partition = fit_shapes(weight, partition)
    return jax.tree.map(part_of, weight, places_of(weight, partition))


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
