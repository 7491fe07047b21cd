"""The user's live torch weights as JAX arrays: converted once for all engines, refreshed when they change."""

from __future__ import annotations

import threading
import weakref
from typing import Any

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jax_bridge.arrays import to_jax
from jax_bridge.layout import Turned, Weight, by_rows, pays

Fingerprint = tuple

# Live tensor -> its fingerprint and storage when converted, the array, and whether that is turned. Keys and
# arrays are weak: an array lives while an engine uses it, and engines of one model (lengths, batch sizes)
# use the same arrays. The storage is held so that its address cannot be given to new values that would look
# unchanged.
_converted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Changes with every in-place write that torch's version counter sees (not writes through ``.data``)."""
    version = None if tensor.is_inference() else tensor._version
    return tensor.data_ptr(), version, tensor.dtype, tuple(tensor.shape)


def _known(tensor: torch.Tensor, turn: bool) -> Weight | None:
    """What was made from this tensor as it now is, if an engine still uses it."""
    mark, _, reference, turned = _converted.get(tensor) or (None, None, lambda: None, False)
    array = reference() if mark == fingerprint(tensor) and turned == turn else None
    return Turned(array) if turned and array is not None else array


def _convert(tensor: torch.Tensor, turn: bool) -> Weight:
    # One copy, in memory that JAX may keep, for a weight is never donated.
    source = tensor.detach().T if turn else tensor.detach()
    own = source.to("cpu", copy=True, memory_format=torch.contiguous_format)
    array = by_rows(to_jax(own, copy=False))
    _converted[tensor] = (fingerprint(tensor), tensor.untyped_storage(), weakref.ref(array), turn)
    return Turned(array) if turn else array


class Weights:
    """The arrays one engine uses, by name.

    Args:
        linear: names of the weights whose layout may be chosen (`jax_bridge.layout`).
    """

    def __init__(self, linear: frozenset[str]):
        self._linear = linear
        self._arrays: dict[str, Weight] = {}

    def refresh(self, tensors: dict[str, Any]) -> dict[str, Weight]:
        """Arrays for ``tensors``; only changed ones are converted. What is on the device already stays."""
        device = jax.devices()[0]
        with _lock:
            for name, tensor in tensors.items():
                if not isinstance(tensor, torch.Tensor):
                    self._arrays[name] = tensor
                    continue
                turn = name in self._linear and pays(tensor.dtype, device)
                array = _known(tensor, turn)
                if array is None:
                    self._arrays.pop(name, None)  # freed before its successor: the device holds one copy
                    array = _convert(tensor, turn)
                self._arrays[name] = array
            return dict(self._arrays)
