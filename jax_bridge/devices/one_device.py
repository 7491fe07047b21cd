"""Where a runtime keeps weights, states and what comes from the host: on one device."""

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


class OneDevice:
    """One of JAX's devices. Several that share weights are `jax_bridge.devices.on_mesh.OnMesh`.

    Attributes:
        devices: itself.
        platform: of the device.
    """

    def __init__(self, pair: Pair, device: Any, compute: str, quantize: str | None):
        self.devices, self._device, self.platform = {device}, device, device.platform
        head = pair.target.model.get_output_embeddings()
        self._rules = LayoutRules.of(pair, head, compute=compute, quantize=quantize)

    def weights(self) -> Weights:
        """The live weights here."""
        return Weights(self._rules, self._device)

    def step(self, step: Callable) -> Callable:
        """``step`` as it is compiled."""
        return step

    def share(self, weights: Any, state: Any) -> tuple[Any, Any]:
        """What a device has of weights by name and of a state, given as shapes: all of them."""
        return weights, state

    def told(self, step: Callable) -> Callable:
        """``step``, of which the host reads what it makes."""
        return step

    def whole(self, part: Any) -> Any:
        """A part of a state, which this process can read."""
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
        """A state that a user held, wherever it lies; torch tensors stay what they are."""
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        if all(leaf.is_deleted() or leaf.devices() == self.devices for leaf in arrays):
            return state
        return jax.device_put(whole_tails(state), self._device)
