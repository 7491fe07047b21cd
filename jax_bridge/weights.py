"""The user's live torch weights as JAX arrays: converted once for all engines, refreshed when they change."""

from __future__ import annotations

import threading
import weakref

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jax_bridge.arrays import to_jax

Fingerprint = tuple

# Live tensor -> its fingerprint and storage when converted, and the array. Keys and arrays are weak: an
# array lives while an engine uses it, and engines of one model (lengths, batch sizes) use the same arrays.
# The storage is held so that its address cannot be given to new values that would look unchanged.
_converted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Changes with every in-place write that torch's version counter sees (not writes through ``.data``)."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tuple(tensor.shape)


def _known(tensor: torch.Tensor) -> jax.Array | None:
    """The array made from this tensor as it now is, if an engine still uses it."""
    mark, _, reference = _converted.get(tensor) or (None, None, lambda: None)
    return reference() if mark == fingerprint(tensor) else None


def _convert(tensor: torch.Tensor) -> jax.Array:
    array = to_jax(tensor)
    _converted[tensor] = (fingerprint(tensor), tensor.untyped_storage(), weakref.ref(array))
    return array


class Weights:
    """The arrays one engine uses, by name."""

    def __init__(self):
        self._arrays: dict[str, jax.Array] = {}

    def refresh(self, tensors: dict[str, torch.Tensor]) -> dict[str, jax.Array]:
        """Arrays for ``tensors``; only changed ones are converted."""
        with _lock:
            for name, tensor in tensors.items():
                array = _known(tensor)
                if array is None:
                    self._arrays.pop(name, None)  # freed before its successor: the device holds one copy
                    array = _convert(tensor)
                self._arrays[name] = array
            return dict(self._arrays)
