"""The devices on which each replica of a pair decodes."""

from __future__ import annotations

from typing import Any

from jax_bridge.mesh.placement import OnMesh
from jax_bridge.mesh.refusals import check_pair_on_mesh
from jax_bridge.mesh.rules import heads_of
from jax_bridge.mesh.shape import check_distinct, parts_of, slice_mesh
from jax_bridge.placement import OneDevice
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan

Place = OneDevice | OnMesh


def places_of(pair: Pair, plan: DecodePlan, mesh: Any, replicas: int, **arithmetic: Any) -> list[Place]:
    """The place of each replica; ``mesh`` and ``replicas`` as in `torch_dflash.compile`.

    A single device is no mesh: it runs the programs of JAX's default device.

    Raises:
        TypeError, ValueError: no such mesh, one that cannot be shared out, or something that is not decoded
            on one, by its name.
    """
    parts = parts_of(mesh, replicas)
    if len(parts[0]) == 1:
        return [OneDevice(pair, device, **arithmetic) for (device,) in parts]
    check_pair_on_mesh(pair, plan, **arithmetic)
    for devices in parts:
        check_distinct(devices)
    heads = heads_of(pair.target.config)
    return [OnMesh(pair, slice_mesh(devices, heads)) for devices in parts]
