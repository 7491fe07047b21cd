"""Weights, states and host inputs on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import torch

from jax_bridge.arrays import to_jax, to_numpy
from jax_bridge.devices.weights import Weights
from jax_bridge.state import state_to_jax
from jax_bridge.tails import whole_tails
from jax_bridge.weights.layout import LayoutRules
from torch_dflash.decode import Pair
from torch_dflash.targets.latents import weights_of


class OneDevice:
    """One of JAX's devices; for several that share weights see `jax_bridge.devices.on_mesh.OnMesh`.

    Attributes:
        devices: the set of this device.
        platform: its JAX platform.
    """

    def __init__(self, pair: Pair, device: Any, **arithmetic: Any):
        self.devices, self._device, self.platform = {device}, device, device.platform
        self._rules = rules_of(pair, **arithmetic)

    def weights(self) -> Weights:
        """The live weights on this device."""
        return Weights(self._rules, self._device)

    def step(self, step: Callable) -> Callable:
        """The function to compile: ``step`` itself."""
        return step

    def share(self, weights: Any, state: Any) -> tuple[Any, Any]:
        """The device's part of weights by name and of a state, all as shapes: everything, in its format."""

        def kept(name: str, leaf: Any) -> Any:
            return self._rules.shapes(name, leaf.shape, getattr(torch, leaf.dtype.name), self._device)

        return {name: kept(name, leaf) for name, leaf in weights.items()}, state

    def host_output(self, step: Callable) -> Callable:
        """``step``, whose result the host reads."""
        return step

    def whole(self, part: Any) -> Any:
        """A part of a state; this process can read all of it."""
        return part

    def put(self, tree: Any) -> Any:
        """Torch tensors of ``tree`` as arrays that may be donated."""
        return to_jax(tree, device=self._device)

    def send(self, tree: Any) -> Any:
        """Torch tensors and numpy arrays of ``tree``, in one transfer, as arrays that are never donated."""
        hosts = jax.tree.map(lambda leaf: to_numpy(leaf) if isinstance(leaf, torch.Tensor) else leaf, tree)
        return jax.device_put(hosts, self._device)

    def put_state(self, state: Any) -> Any:
        """A state of torch tensors as arrays that may be donated."""
        return state_to_jax(state, self._device)

    def adopt(self, state: Any) -> Any:
        """A user's state, moved here from any device; torch tensors stay torch tensors."""
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        if all(leaf.is_deleted() or leaf.devices() == self.devices for leaf in arrays):
            return state
        return jax.device_put(whole_tails(state), self._device)


def rules_of(pair: Pair, **arithmetic: Any) -> LayoutRules:
    """The rules for the layouts of a pair's weights."""
    latents = weights_of(pair.target.latents, "target.model.")
    return LayoutRules.of(pair, pair.target.model.get_output_embeddings(), latents, **arithmetic)
