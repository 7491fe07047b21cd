"""Arguments of a step as shapes with shardings, for compilation without arrays."""

from __future__ import annotations

import os
from functools import lru_cache, partial
from importlib.util import find_spec
from typing import Any

import jax
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, Sharding

from jax_bridge.aot.floor import Floor, Shares, floor_of
from jax_bridge.arrays import row_major_format
from jax_bridge.devices.on_mesh import OnMesh, shardings
from jax_bridge.mesh.cut import in_format
from jax_bridge.mesh.put import fit_shapes, places_of
from jax_bridge.mesh.rules import heads_of
from jax_bridge.mesh.shape import AXIS, KV
from jax_bridge.tails import cut_tails


def shape_at(leaf: Any, place: Sharding, by_rows: bool = False) -> jax.ShapeDtypeStruct:
    """A shape at ``place``; ``by_rows``: it is row-major, as weights are on a TPU."""
    axes = len(leaf.shape)
    at: Any = row_major_format(place, axes) if by_rows and axes > 1 else place
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)


def on_slice(place: OnMesh, params: Any, state: Any, *more: Any) -> tuple:
    """A step's arguments on the chips of a slice."""

    def weight(name: str, leaf: Any) -> Any:
        leaf, partition = fit_shapes(leaf, place.partitions[name])
        places = places_of(leaf, partition)
        return in_format(jax.tree.map(partial(shape_at, by_rows=True), leaf, places), partition)

    weights = {name: weight(name, leaf) for name, leaf in params.items()}
    given = jax.eval_shape(partial(cut_tails, blocks=place.slice.blocks), (state, *more))
    rest = jax.tree.map(shape_at, given, shardings(given, place.slice))
    return weights, *rest


def floor_on_slice(model: Any, place: OnMesh, context: int) -> Floor:
    """`jax_bridge.aot.floor.floor_of` for one chip: its parts of the weights, and its K/V heads."""
    parts, _ = place.share(model.params, ())
    drafter = getattr(model.pair.proposer, "drafter", None)
    configs = [model.pair.target.config, *([] if drafter is None else [drafter.config])]
    kv = place.mesh.shape[KV]
    shares = [kv if heads_of(config).groups in place.slice.groups else 1 for config in configs]
    shares[0] = 1 if place.slice.latents else shares[0]
    states = place.mesh.size if place.slice.blocks else 1
    return floor_of(model.pair, parts, context, Shares(shares[0], shares[-1], states, place.mesh.size))


def slice_devices(topology: str, chips: int) -> Mesh:
    """The first ``chips`` of a topology.

    Raises:
        ModuleNotFoundError: libtpu is not installed. ValueError: no such topology, or one of fewer chips.
    """
    devices = find_topology(topology).devices
    if not 1 <= chips <= len(devices):
        raise ValueError(f"chips={chips}: {topology} has {len(devices)}; name at most so many.")
    return Mesh(np.array(devices[:chips]), (AXIS,))


@lru_cache
def find_topology(name: str) -> Any:
    """libtpu's description of a topology; one object per name and process, because two never compare equal.

    Raises:
        ModuleNotFoundError: libtpu is not installed. ValueError: it knows no such topology.
    """
    if find_spec("libtpu") is None:
        raise ModuleNotFoundError(
            "libtpu is not installed, and it is the TPU compiler: pip install 'jax[tpu]'. "
            "export_round works without it."
        )
    # libtpu locks the chips that it expects to drive: a second process that only compiles would abort.
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    try:
        return topologies.get_topology_desc(platform="tpu", topology_name=name)
    except jax.errors.JaxRuntimeError as error:
        raise ValueError(
            f"topology={name!r}: {' '.join(str(error).split())[:200]}; name a generation and its shape, such "
            "as v5p:2x2x1, v5e:2x2 or v6e:2x2."
        ) from None
