"""The user's live torch weights as JAX arrays, converted once and refreshed when they change."""

from __future__ import annotations

import threading

import jax
import torch

from jax_bridge.arrays import to_jax


def fingerprint(tensor: torch.Tensor) -> tuple:
    """Changes with every in-place write that torch's version counter sees (not writes through ``.data``)."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tuple(tensor.shape)


class Weights:
    """Arrays by name, with the fingerprint of the tensor each came from."""

    def __init__(self):
        self._arrays: dict[str, tuple[tuple, jax.Array]] = {}
        self._lock = threading.Lock()

    def refresh(self, tensors: dict[str, torch.Tensor]) -> dict[str, jax.Array]:
        """Arrays for ``tensors``; only those whose fingerprint changed are converted (and old ones freed)."""
        with self._lock:
            for name, tensor in tensors.items():
                mark = fingerprint(tensor)
                if name not in self._arrays or self._arrays[name][0] != mark:
                    self._arrays[name] = (mark, to_jax(tensor))
            return {name: self._arrays[name][1] for name in tensors}
