"""The mesh that a pair decodes on: K/V heads along one axis, copies of them along the other.

Query heads are ordered by K/V head. Cut over both axes they are on the chip of their own K/V head, so
attention exchanges nothing. With fewer K/V heads than chips each head is copied to several.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import Mesh

from jax_bridge.arrays import default_device
from torch_dflash.checks import is_count

KV, COPIES = "kv", "rep"
ALL = (KV, COPIES)
"""Axes of arrays that are cut over every chip; K/V heads use `KV` alone."""
AXIS = "model"


class Heads(NamedTuple):
    """Attention heads of a model's layers: ``queries`` Q and ``groups`` G, its K/V heads."""

    queries: int
    groups: int


def devices_of(mesh: Any) -> list[Any] | None:
    """The devices that ``mesh`` names; None: JAX's default device alone.

    Args:
        mesh: a `jax.sharding.Mesh` with the one axis "model", how many of JAX's devices, "auto" for all of
            them, or None.

    Raises:
        TypeError, ValueError: it is none of these, or asks for devices that are not there.
    """
    if mesh is None:
        return None
    known = jax.devices()
    if isinstance(mesh, Mesh):
        devices = _of_a_mesh(mesh)
    elif is_count(mesh) and mesh >= 1:
        if mesh > len(known):
            raise ValueError(f"mesh={mesh}: JAX has {len(known)} device(s) here; ask for at most so many.")
        devices = known[:mesh] if mesh > 1 else [default_device()]
    elif isinstance(mesh, str) and mesh == "auto":
        devices = known
    else:
        raise TypeError(
            f'mesh={mesh!r}: pass a jax.sharding.Mesh with an axis {AXIS!r}, a number of devices, or "auto".'
        )
    return None if devices == [default_device()] else devices


def parts_of(mesh: Any, replicas: int) -> list[list[Any]]:
    """The devices of ``mesh``, in their order, in ``replicas`` parts of one size.

    Raises:
        TypeError, ValueError: as `devices_of`; the devices do not divide evenly, or are several processes'.
    """
    devices = devices_of(mesh) or [default_device()]
    if len(devices) % replicas:
        counts = [str(count) for count in range(1, len(devices) + 1) if len(devices) % count == 0]
        raise ValueError(
            f"replicas={replicas} on {len(devices)} device(s): all must have equally many; pass replicas="
            f"{' or '.join(counts)}, or another mesh."
        )
    if replicas > 1 and jax.process_count() > 1:
        raise ValueError(
            f"replicas={replicas}: JAX runs in {jax.process_count()} processes, and replicas are of one "
            "process's devices; leave replicas out."
        )
    size = len(devices) // replicas
    return [devices[first : first + size] for first in range(0, len(devices), size)]


def check_distinct(devices: list[Any]) -> None:
    """Raise ``ValueError`` if a device occurs twice among those that share each weight."""
    for device in devices:
        if (count := devices.count(device)) > 1:
            raise ValueError(
                f"mesh has {device} {count} times: each chip has one part; name it once, or "
                f"pass replicas={count} for copies on one device."
            )


def _of_a_mesh(mesh: Mesh) -> list[Any]:
    if mesh.axis_names not in ((AXIS,), ALL):
        raise ValueError(
            f"mesh has the axes {mesh.axis_names}: it must have one, called {AXIS!r}; rows are spread over "
            "parts of it with replicas=, not by an axis."
        )
    if not mesh.devices.size:
        raise ValueError('mesh has no devices; pass one that has some, or "auto" for all.')
    return list(mesh.devices.flat)


def slice_mesh(devices: list[Any], heads: Heads) -> Mesh:
    """The mesh of ``devices`` for a target with these heads.

    Where heads do not divide evenly, attention is whole on every chip and the axis `KV` has one entry.
    """
    size = len(devices)
    even = heads.queries % size == 0 and (heads.groups % size == 0 or size % heads.groups == 0)
    kv = min(size, heads.groups) if even else 1
    return Mesh(np.array(devices).reshape(kv, size // kv), ALL)


def are_cut(heads: Heads, mesh: Mesh) -> bool:
    """Whether attention with these heads is cut: each chip has whole K/V heads and all their queries."""
    kv, copies = mesh.shape[KV], mesh.shape[COPIES]
    whole = heads.queries % mesh.size == 0 and heads.groups % kv == 0
    return whole and (copies == 1 or heads.groups == kv)
