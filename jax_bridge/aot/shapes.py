"""Arguments of a step as shapes with places: what a compiler needs instead of arrays."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh, Sharding

from jax_bridge.aot.floor import Floor, Shares, floor_of
from jax_bridge.aot.topology import find_topology
from jax_bridge.layout import row_major_format
from jax_bridge.mesh.cut import in_form
from jax_bridge.mesh.placement import OnMesh
from jax_bridge.mesh.rules import heads_of
from jax_bridge.mesh.shape import AXIS, KV
from jax_bridge.mesh.states import shardings
from jax_bridge.mesh.tails import cut_tails


def shape_at(leaf: Any, place: Sharding, by_rows: bool = False) -> jax.ShapeDtypeStruct:
    """A shape at ``place``; ``by_rows``: a weight, of which matrices lie as `jax_bridge.layout` puts them."""
    at: Any = row_major_format(place) if by_rows and len(leaf.shape) == 2 else place
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)


def on_slice(place: OnMesh, params: Any, state: Any, *more: Any) -> tuple:
    """A step's arguments on the chips of a slice."""

    def weight(name: str, leaf: Any) -> Any:
        way = place.forms[name]
        return in_form(shape_at(leaf, way.place, by_rows=True), way)

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
    states = place.mesh.size if place.slice.blocks else 1
    return floor_of(model.pair, parts, context, Shares(shares[0], shares[-1], states))


def slice_devices(topology: str, chips: int) -> Mesh:
    """The first ``chips`` of a topology.

    Raises:
        ModuleNotFoundError: libtpu is not installed. ValueError: no such topology, or one of fewer chips.
    """
    devices = find_topology(topology).devices
    if not 1 <= chips <= len(devices):
        raise ValueError(f"chips={chips}: {topology} has {len(devices)}; name at most so many.")
    return Mesh(np.array(devices[:chips]), (AXIS,))
