"""The places on a mesh of weights, states and what comes from the host."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch
from jax.sharding import Mesh, NamedSharding

from jax_bridge.mesh.current import WHOLE
from jax_bridge.mesh.put import part_of, put, put_leaf, whole
from jax_bridge.mesh.rules import slice_of, ways_of
from jax_bridge.mesh.states import keep_in_place, shardings
from jax_bridge.mesh.tails import cut_tails, whole_tails
from jax_bridge.state import register_states
from jax_bridge.weights import Weights
from torch_dflash.decode import Pair
from torch_dflash.state import DecodeState


class OnMesh:
    """The chips of a mesh, as `jax_bridge.placement.OneDevice` is one.

    Attributes:
        devices: the chips.
        platform: of the chips.
        forms: where each weight lies.
    """

    def __init__(self, pair: Pair, mesh: Mesh):
        self.mesh, self.slice = mesh, slice_of(pair, mesh)
        self.devices = set(mesh.devices.flat)
        self.platform = mesh.devices.flat[0].platform
        self.forms = ways_of(pair, mesh)

    def weights(self) -> Weights:
        """The live weights in their parts."""
        return Weights(self.forms)

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

    def share(self, weights: Any, state: Any) -> tuple[Any, Any]:
        """What one chip has of weights by name and of a state, all given as shapes."""
        own = {name: part_of(leaf, self.forms[name].place) for name, leaf in weights.items()}
        return own, jax.tree.map(part_of, state, shardings(state, self.slice))

    def told(self, step: Callable) -> Callable:
        """``step`` traced for the slice; what it tells the host is whole on every chip."""

        def on_slice(*args: Any) -> Any:
            with self.slice.traced():
                out = step(*args)
            return jax.lax.with_sharding_constraint(out, NamedSharding(self.mesh, WHOLE))

        return on_slice

    def whole(self, part: Any) -> Any:
        """A part of a state as this process can read it, whatever lies in others."""
        return whole_tails(whole(part, self.mesh))

    def put(self, tree: Any) -> Any:
        """Torch tensors of ``tree``, whole on every chip; they may be donated."""
        register_states()
        return put(cut_tails(tree, self.slice.blocks), self.mesh)

    send = put

    def put_state(self, state: Any) -> Any:
        """A state of torch tensors on its places."""
        register_states()
        state = cut_tails(state, self.slice.blocks)
        return jax.tree.map(put_leaf, state, shardings(state, self.slice))

    def adopt(self, state: Any) -> Any:
        """A state that a user held, wherever it lies; torch tensors stay what they are."""
        register_states()
        if any(isinstance(leaf, torch.Tensor) or leaf.is_deleted() for leaf in jax.tree.leaves(state)):
            return state  # refused by whoever takes it in
        state = cut_tails(state, self.slice.blocks)
        return jax.device_put(state, shardings(state, self.slice))
