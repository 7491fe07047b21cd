"""Which devices each replica of a pair decodes on."""

from __future__ import annotations

from typing import Any

import jax

from jax_bridge.mesh.placement import OnMesh
from jax_bridge.mesh.refusals import check_pair_on_mesh
from jax_bridge.mesh.rules import heads_of
from jax_bridge.mesh.shape import devices_of, slice_mesh
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
    heads = heads_of(pair.target.config)
    return [OnMesh(pair, slice_mesh(devices, heads)) for devices in parts]


def parts_of(mesh: Any, replicas: int) -> list[list[Any]]:
    """The devices of ``mesh``, in their order, in ``replicas`` parts of one size.

    Raises:
        TypeError, ValueError: as `devices_of`; the devices do not divide evenly, or are several processes'.
    """
    devices = devices_of(mesh) or jax.devices()[:1]
    if len(devices) % replicas:
        counts = [str(count) for count in range(1, len(devices) + 1) if len(devices) % count == 0]
        raise ValueError(
            f"replicas={replicas} on {len(devices)} device(s): each has as many as the others; pass replicas="
            f"{' or '.join(counts)}, or another mesh."
        )
    if replicas > 1 and jax.process_count() > 1:
        raise ValueError(
            f"replicas={replicas}: JAX runs in {jax.process_count()} processes, and replicas are of one "
            "process's devices; leave replicas out."
        )
    size = len(devices) // replicas
    return [devices[first : first + size] for first in range(0, len(devices), size)]
