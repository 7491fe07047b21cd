"""The user's live torch weights as JAX arrays: converted once for all engines, refreshed when they change."""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from typing import Any, NamedTuple

import jax
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jax_bridge.arrays import to_jax
from jax_bridge.layout import Transposed, Weight, row_major, transpose_pays
from jax_bridge.probe import places, unchanged

Fingerprint = tuple


class _Converted(NamedTuple):
    """What was made of a tensor. The array is weak: it lives while an engine uses it.

    ``places`` is a view, so the storage is held: its address cannot be given to new values that would look
    unchanged.
    """

    mark: Fingerprint
    places: torch.Tensor
    bits: torch.Tensor
    array: weakref.ref
    transposed: bool


# By live tensor, weakly, so that engines of one model (lengths, batch sizes) use the same arrays.
_converted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()
_ORDINARY = (torch.Tensor, torch.nn.Parameter, torch.nn.Buffer)


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Changes with every write that torch's version counter sees. Inference tensors have no counter."""
    version = None if tensor.is_inference() else tensor._version
    view = tensor.is_neg(), tensor.is_conj()
    return tensor.data_ptr(), version, tensor.dtype, tuple(tensor.shape), tensor.stride(), view


def _known(tensor: torch.Tensor, transpose: bool) -> _Converted | None:
    """What was made of this tensor, if an engine still uses it and no counted write came since."""
    known = _converted.get(tensor)
    if known is None or known.transposed != transpose or known.array() is None:
        return None
    return known if known.mark == fingerprint(tensor) else None


def _convert(tensor: torch.Tensor, transpose: bool) -> jax.Array:
    mark, at = fingerprint(tensor), places(tensor)
    bits = at.flatten().clone()
    # One copy, in memory that JAX may keep, for a weight is never donated.
    source = tensor.detach().T if transpose else tensor.detach()
    own = source.to("cpu", copy=True, memory_format=torch.contiguous_format)
    array = row_major(to_jax(own, copy=False))
    _converted[tensor] = _Converted(mark, at, bits, weakref.ref(array), transpose)
    return array


class Weights:
    """The arrays one engine uses, by name.

    Args:
        linear: names of the weights whose layout may be chosen (`jax_bridge.layout`).
    """

    def __init__(self, linear: frozenset[str]):
        self._linear = linear
        self._arrays: dict[str, Weight] = {}

    def refresh(self, tensors: dict[str, Any]) -> dict[str, Weight]:
        """Arrays for ``tensors``; only changed ones are converted. What is on the device already stays.

        Seen are all writes that torch counts: in place, ``load_state_dict``, ``detach()``, also under
        ``torch.no_grad()`` and ``torch.inference_mode()``. Of those it does not count (fused optimisers,
        ``.data``, numpy views) one is seen if it changes a bit in the `places` that are looked at; then all
        weights of that model are converted, for such writes come together. So whole weights are seen, and any
        contiguous 32nd part of one; a row alone may not be: `forget` is for that. Inference tensors are
        looked at in every row.

        Raises:
            ValueError: a tensor is of a class of its own: what it computes is not in its memory.
        """
        device = jax.devices()[0]
        with _lock:
            torches = {name: leaf for name, leaf in tensors.items() if isinstance(leaf, torch.Tensor)}
            for name, leaf in torches.items():
                if type(leaf) not in _ORDINARY:
                    raise ValueError(
                        f"{name} is a {type(leaf).__name__}, which runtime='xla' cannot read; make it an "
                        "ordinary tensor (dequantise it), or pass runtime='eager'."
                    )
            self._arrays |= {name: leaf for name, leaf in tensors.items() if name not in torches}
            transposes = {
                name: name in self._linear and transpose_pays(leaf.dtype, device)
                for name, leaf in torches.items()
            }
            known = {name: _known(leaf, transposes[name]) for name, leaf in torches.items()}
            doubted = _doubted(known)
            for name, tensor in torches.items():
                made = known[name]
                array = made.array() if made is not None and _part(name) not in doubted else None
                if array is None:
                    self._arrays.pop(name, None)  # freed before its successor: the device holds one copy
                    array = _convert(tensor, transposes[name])
                self._arrays[name] = Transposed(array) if transposes[name] else array
            return dict(self._arrays)

    def forget(self, tensors: dict[str, Any]) -> None:
        """Have every engine convert ``tensors`` on its next use of them."""
        with _lock:
            for tensor in tensors.values():
                if isinstance(tensor, torch.Tensor):
                    _converted.pop(tensor, None)


def _part(name: str) -> str:
    """Which model a weight belongs to: "target" or "proposer"."""
    return name.partition(".")[0]


def _doubted(known: dict[str, _Converted | None]) -> set[str]:
    """The models of which a weight was written without being counted."""
    pairs = defaultdict(list)
    for name, made in known.items():
        if made is not None:
            pairs[_part(name)].append((made.places, made.bits))
    return {part for part, views in pairs.items() if not unchanged(views)}
