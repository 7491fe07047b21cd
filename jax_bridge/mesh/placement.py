"""Where a runtime on a mesh keeps weights, states and what comes from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding

from jax_bridge.mesh.current import WHOLE
from jax_bridge.mesh.put import put, put_leaf, whole
from jax_bridge.mesh.refusals import check_pair_on_mesh
from jax_bridge.mesh.rules import heads_of, slice_of, ways_of
from jax_bridge.mesh.shape import devices_of, slice_mesh
from jax_bridge.mesh.states import keep_in_place, shardings
from jax_bridge.state import register_states
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan
from torch_dflash.state import DecodeState


class OnMesh:
    """The chips of a mesh, as `jax_bridge.placement.OneDevice` is one.

    Attributes:
        platform: of the chips.
        forms: where each weight lies.
    """

    def __init__(self, pair: Pair, mesh: Mesh):
        self.mesh, self.slice = mesh, slice_of(pair, mesh)
        self.platform = mesh.devices.flat[0].platform
        self.forms = ways_of(pair, mesh)

    @classmethod
    def of(cls, pair: Pair, plan: DecodePlan, mesh: Any, **arithmetic: Any) -> OnMesh | None:
        """What ``mesh``, as in `torch_dflash.compile`, stands for; None: JAX's default device.

        Raises:
            TypeError, ValueError: no such mesh, or something is not decoded on one, by its name.
        """
        devices = devices_of(mesh)
        if devices is None:
            return None
        check_pair_on_mesh(pair, plan, **arithmetic)
        return cls(pair, slice_mesh(devices, heads_of(pair.target.config)))

    def step(self, step: Callable) -> Callable:
        """``step`` traced for the slice; its state leaves as it comes, so that buffers stay in place.

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

    def told(self, step: Callable) -> Callable:
        """``step`` traced for the slice; what it tells the host is whole on every chip."""

        def on_slice(*args: Any) -> Any:
            with self.slice.traced():
                out = step(*args)
            return jax.lax.with_sharding_constraint(out, NamedSharding(self.mesh, WHOLE))

        return on_slice

    def whole(self, part: Any) -> Any:
        """A part of a state as this process can read it, whatever lies in others."""
        return whole(part, self.mesh)

    def put(self, tree: Any) -> Any:
        """Torch tensors of ``tree``, whole on every chip; they may be donated."""
        register_states()
        return put(tree, self.mesh)

    send = put

    def put_state(self, state: Any) -> Any:
        """A state of torch tensors on its places."""
        register_states()
        return jax.tree.map(put_leaf, state, shardings(state, self.slice))

    def adopt(self, state: Any) -> Any:
        """A state that a user held, wherever it lies; torch tensors stay what they are."""
        register_states()
        if any(isinstance(leaf, torch.Tensor) or leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return state  # refused by whoever takes it in
        return jax.device_put(state, shardings(state, self.slice))
