"""Where a runtime keeps weights, states and what comes from the host: on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_bridge.arrays import to_jax
from jax_bridge.layout import Forms
from jax_bridge.state import state_to_jax
from torch_dflash.decode import Pair


class OneDevice:
    """JAX's default device. On several it is `jax_bridge.mesh.placement.OnMesh`.

    Attributes:
        devices: it alone.
        platform: of the device.
        forms: in which form each weight is kept.
    """

    def __init__(self, pair: Pair, compute: str, quantize: str | None):
        self.devices = jax.devices()[:1]
        self.platform = self.devices[0].platform
        head = pair.target.model.get_output_embeddings()
        self.forms = Forms.of(pair, head, compute=compute, quantize=quantize)

    def step(self, step: Callable) -> Callable:
        """``step`` as it is compiled."""
        return step

    def share(self, weights: Any, state: Any) -> tuple[Any, Any]:
        """What a device has of weights by name and of a state, given as shapes: all of them."""
        return weights, state

    def put(self, tree: Any) -> Any:
        """Torch tensors of ``tree`` as arrays that may be donated."""
        return to_jax(tree)

    def send(self, tree: Any) -> Any:
        """Numpy arrays of ``tree`` as arrays that are read alone."""
        return jax.device_put(tree)

    def put_state(self, state: Any) -> Any:
        """A state of torch tensors as arrays that may be donated."""
        return state_to_jax(state)

    def adopt(self, state: Any) -> Any:
        """A state that a user held, wherever it lies; torch tensors stay what they are."""
        here = jax.devices()[0]
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        if all(leaf.is_deleted() or leaf.devices() == {here} for leaf in arrays):
            return state
        return jax.device_put(state, here)
