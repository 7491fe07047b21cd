"""Where a runtime keeps weights, states and what comes from the host: on one device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from jax_bridge.arrays import default_device, to_jax
from jax_bridge.layout import Forms
from jax_bridge.state import state_to_jax
from torch_dflash.decode import Pair


class OneDevice:
    """JAX's default device. On several it is `jax_bridge.mesh.placement.OnMesh`.

    Attributes:
        platform: of the device.
        forms: in which form each weight is kept.
    """

    def __init__(self, pair: Pair, compute: str, quantize: str | None):
        self.platform = default_device().platform
        head = pair.target.model.get_output_embeddings()
        self.forms = Forms.of(pair, head, compute=compute, quantize=quantize)

    def step(self, step: Callable) -> Callable:
        """``step`` as it is compiled."""
        return step

    def told(self, step: Callable) -> Callable:
        """``step``, of which the host reads what it makes."""
        return step

    def whole(self, part: Any) -> Any:
        """A part of a state, which this process can read."""
        return part

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
        here = default_device()
        arrays = [leaf for leaf in jax.tree.leaves(state) if isinstance(leaf, jax.Array)]
        if all(leaf.is_deleted() or leaf.devices() == {here} for leaf in arrays):
            return state
        return jax.device_put(state, here)
