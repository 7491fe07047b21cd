"""Weights, states and host inputs on a mesh."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import torch
from jax.sharding import Mesh, NamedSharding

from jax_bridge.devices.one_device import OneDevice, rules_of
from jax_bridge.devices.weights import Weights
from jax_bridge.mesh.current import WHOLE, P, Slice
from jax_bridge.mesh.put import part_of, put, put_leaf, share_of, whole
from jax_bridge.mesh.refusals import check_pair_on_mesh
from jax_bridge.mesh.rules import heads_of, partitions_of, slice_of
from jax_bridge.mesh.shape import ALL, check_distinct, parts_of, slice_mesh
from jax_bridge.state import is_cache, register_states
from jax_bridge.tails import cut_tails, is_recurrent, whole_tails
from jax_bridge.weights.codes import InCodes, Scaled
from jax_bridge.weights.layout import check_arithmetic
from torch_dflash.cache.recurrent import FreshState
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan
from torch_dflash.state import DecodeState


class OnMesh:
    """The chips of a mesh, with the methods of `jax_bridge.devices.one_device.OneDevice`.

    Attributes:
        devices: the chips. platform: their JAX platform.
        partitions: of each weight by name.
    """

    def __init__(self, pair: Pair, mesh: Mesh, **arithmetic: Any):
        self.mesh, self.slice = mesh, slice_of(pair, mesh)
        self.devices = set(mesh.devices.flat)
        self.platform = mesh.devices.flat[0].platform
        self.partitions = partitions_of(pair, mesh)
        self._rules, self._device = rules_of(pair, **arithmetic), mesh.devices.flat[0]

    def weights(self) -> Weights:
        """The live weights, cut over the mesh."""
        return Weights(self._rules, self._device, self.partitions)

    def step(self, step: Callable) -> Callable:
        """``step`` traced for the slice; its state keeps its shardings, so that buffers stay in place.

        A pass may return more than the state, which then comes first.
        """

        def on_slice(*args: Any) -> Any:
            with self.slice.traced():
                out = step(*args)
            if isinstance(out, DecodeState):
                return keep_in_place(out, self.slice)
            state, *more = out
            return keep_in_place(state, self.slice), *more

        on_slice.__name__ = step.__name__
        return on_slice

    def share(self, weights: Any, state: Any) -> tuple[Any, Any]:
        """One chip's part of weights by name and of a state, all as shapes."""

        def kept(name: str, leaf: Any) -> Any:
            given = name, leaf.shape, getattr(torch, jnp.dtype(leaf.dtype).name)
            coded = not isinstance(leaf, InCodes) and self._rules.in_codes(*given, self._device)
            return share_of(Scaled.shapes(*given[1:]) if coded else leaf, self.partitions[name])

        own = {name: kept(name, leaf) for name, leaf in weights.items()}
        return own, jax.tree.map(part_of, state, shardings(state, self.slice))

    def host_output(self, step: Callable) -> Callable:
        """``step`` traced for the slice; its result is whole on every chip, for the host."""

        def on_slice(*args: Any) -> Any:
            with self.slice.traced():
                out = step(*args)
            return jax.lax.with_sharding_constraint(out, NamedSharding(self.mesh, WHOLE))

        return on_slice

    def whole(self, part: Any) -> Any:
        """A part of a state as arrays that this process can read, gathered from other processes."""
        return whole_tails(whole(part, self.mesh))

    def put(self, tree: Any) -> Any:
        """Torch tensors of ``tree``, whole on every chip; they may be donated."""
        register_states()
        return put(cut_tails(tree, self.slice.blocks), self.mesh)

    send = put

    def put_state(self, state: Any) -> Any:
        """A state of torch tensors on the mesh."""
        register_states()
        state = cut_tails(state, self.slice.blocks)
        return jax.tree.map(put_leaf, state, shardings(state, self.slice))

    def adopt(self, state: Any) -> Any:
        """A user's state, moved here from any devices; torch tensors stay torch tensors."""
        register_states()
        if any(isinstance(leaf, torch.Tensor) or leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return state  # `import_state` refuses it
        state = cut_tails(state, self.slice.blocks)
        return jax.device_put(state, shardings(state, self.slice))


def shardings(state: Any, own: Slice) -> Any:
    """The sharding of each leaf of a state, or of a part of one."""

    def place(leaf: Any, cached: bool) -> NamedSharding:
        cut = cached and len(leaf.shape) == 4
        return NamedSharding(own.mesh, own.heads(leaf.shape[1])[1] if cut else WHOLE)

    def of_a_node(node: Any) -> Any:
        if recurs(node):
            by_heads = NamedSharding(own.mesh, P(None, ALL) if own.blocks else WHOLE)
            return jax.tree.map(lambda _: by_heads, node)
        return jax.tree.map(lambda leaf: place(leaf, is_cache(node)), node)

    def recurs(node: Any) -> bool:
        return is_recurrent(node) or isinstance(node, FreshState)

    return jax.tree.map(of_a_node, state, is_leaf=lambda node: is_cache(node) or recurs(node))


def keep_in_place(state: Any, own: Slice) -> Any:
    """The ``state`` that a program returns, in its shardings. To be traced."""
    state = cut_tails(state, own.blocks)
    return jax.lax.with_sharding_constraint(state, shardings(state, own))


Place = OneDevice | OnMesh


def places_of(pair: Pair, plan: DecodePlan, mesh: Any, replicas: int, **arithmetic: Any) -> list[Place]:
    """The place of each replica; ``mesh`` and ``replicas`` as in `torch_dflash.compile`.

    A single device is no mesh: it runs the programs of JAX's default device.

    Raises:
        TypeError, ValueError: no such mesh, one that does not divide into ``replicas``, or a part of the pair
            that is not decoded there.
    """
    parts = parts_of(mesh, replicas)
    alone = len(parts[0]) == 1
    check_arithmetic(parts[0][0].platform, not alone, **arithmetic)
    if alone:
        return [OneDevice(pair, device, **arithmetic) for (device,) in parts]
    check_pair_on_mesh(pair, plan)
    for devices in parts:
        check_distinct(devices)
    heads = heads_of(pair.target.config)
    return [OnMesh(pair, slice_mesh(devices, heads), **arithmetic) for devices in parts]
