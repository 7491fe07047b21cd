"""The user's live torch weights as JAX arrays: converted once for all engines, again when they change.

A weight is compared in two ways. Its `Version` changes with every write that torch counts. `samples` of its
bits show writes that torch does not count.
"""

from __future__ import annotations

import threading
import weakref
from collections import defaultdict
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.utils.weak import WeakTensorKeyDictionary

from jax_bridge.arrays import default_device
from jax_bridge.devices.samples import SAMPLES, check_ordinary, on_host, samples, unchanged
from jax_bridge.mesh.cut import Partition
from jax_bridge.mesh.put import place, place_quantised, relocated
from jax_bridge.weights.codes import Scaled
from jax_bridge.weights.formats import Weight
from jax_bridge.weights.layout import LayoutRules, WeightLayout, keep

Version = tuple
"""A tensor's address, torch's count of its writes, dtype, shape, strides and view."""
TURNS = 8
"""Calls in which all large weights are sampled, some in each; all rows of a weight take as many squared."""
SMALL = 1 << 16
"""Bytes up to which a weight is sampled in every call."""


def version_of(tensor: torch.Tensor, counted: bool) -> Version:
    """The version; ``counted``: it is no inference tensor, whose writes torch does not count."""
    count = tensor._version if counted else None
    view = tensor.is_neg(), tensor.is_conj()
    return tensor.data_ptr(), count, tensor.dtype, tensor.shape, tensor.stride(), view


class Storage(NamedTuple):
    """The layout of a weight at a place: whole on a device, or cut over a mesh by a `Partition`."""

    layout: WeightLayout
    place: Any


@dataclass(frozen=True, eq=False)
class _Copy:
    """The copy of a tensor in one storage. The weight is weak: it lives while an engine uses it.

    ``samples`` is a view, so the storage is held: its address cannot be given to new values that would look
    unchanged. Its ``parts`` are compared with ``bits`` in turn.
    """

    version: Version
    samples: Any
    bits: np.ndarray
    parts: int
    weight: weakref.ref

    def part(self, turn: int) -> tuple[Any, np.ndarray]:
        """The samples of a turn, and the bits that were copied."""
        return self.samples[turn % self.parts :: self.parts], self.bits[turn % self.parts :: self.parts]


# By live tensor, weakly, and by storage: engines of one model (lengths, batch sizes) use the same arrays.
_copies: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()
_changes = [0]
"""Count of copies made and forgotten: while it stays, an engine's arrays are up to date."""


class _Watched(NamedTuple):
    """A tensor and the version that an engine copied. Each call compares hundreds, so little is asked."""

    tensor: weakref.ref
    copy: Any  # weakly
    counted: bool
    always: bool
    trained: bool
    version: Version

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: Storage) -> _Watched:
        counted, copy = not tensor.is_inference(), weakref.ref(_copies[tensor][storage])
        # Rows of a table are written alone.
        tall = tensor.ndim == 2 and tensor.shape[0] > 4 * tensor.shape[1]
        always = tall or tensor.nbytes <= SMALL or not counted
        version = version_of(tensor, counted)
        return cls(weakref.ref(tensor), copy, counted, always, tensor.requires_grad, version)

    def holds(self, tensor: Any) -> bool:
        """Whether ``tensor`` is this one at this version."""
        return (
            self.tensor() is tensor
            and self.version == version_of(tensor, self.counted)
            and self.trained == tensor.requires_grad
        )


def _copy_of(tensor: torch.Tensor, storage: Storage) -> _Copy | None:
    """The copy of this tensor, unless a counted write came since or no engine uses it."""
    known = (_copies.get(tensor) or {}).get(storage)
    if known is None or known.weight() is None:
        return None
    return known if known.version == version_of(tensor, not tensor.is_inference()) else None


def _convert(tensor: torch.Tensor, storage: Storage) -> Weight:
    counted, view = not tensor.is_inference(), samples(tensor)
    version = version_of(tensor, counted)
    bits, view = on_host(view).copy(), on_host(view) if view.is_cpu else view
    parts = max(1, min(TURNS**2, len(bits) // (4 * SAMPLES))) if counted else 1
    if isinstance(storage.place, Partition):
        put = place_quantised if storage.layout.format is Scaled else place
        weight = put(tensor.detach().__getitem__, tuple(tensor.shape), storage.place)
    else:
        weight = keep(tensor.detach(), storage.layout, place=storage.place)
    _changes[0] += 1
    used = {key: copy for key, copy in (_copies.get(tensor) or {}).items() if copy.weight() is not None}
    _copies[tensor] = used | {storage: _Copy(version, view, bits, parts, weakref.ref(weight))}
    return weight


class Weights:
    """The arrays one engine uses, by name.

    Args:
        rules: for layouts (`jax_bridge.weights.layout`); of a mesh, for the weights that are codes.
        device: of weights that are whole, or a mesh's first; unset: JAX's default.
        partitions: by name, of weights on a mesh.

    Arrays that were loaded on other devices, those of the first replica, are copied once.
    """

    def __init__(
        self, rules: LayoutRules, device: Any = None, partitions: dict[str, Partition] | None = None
    ):
        self._rules, self._device, self._partitions = rules, device or default_device(), partitions
        self._arrays: dict[str, Weight] = {}
        self._moved: dict[str, tuple[Weight, Weight]] = {}  # loaded weights, and their copies here
        self._current: dict[str, Weight] = {}
        self._watched: dict[str, _Watched | Weight] = {}
        self._groups: list[list[_Watched]] = []  # a part of each is sampled in each call
        self._changes, self._turn = -1, 0

    def refresh(self, tensors: dict[str, Any]) -> dict[str, Weight]:
        """Arrays for ``tensors``, the same dict while nothing changes; only changed ones are converted.

        All writes that torch counts are seen: in place, ``load_state_dict``, ``detach()``, also under
        ``torch.no_grad()`` and ``torch.inference_mode()``. A write that it does not count (fused optimisers,
        ``.data``, numpy views) is seen if it changes a bit of the `samples` that a call compares: some of
        each small weight and table (an embedding, a head), and of every eighth other weight. After one
        such write, or a counted one, all weights are sampled, and a model with a silent write is converted
        whole. A write to few large weights may be seen `TURNS` calls late, one to a row as many squared, or
        cubed where it is no table's, one to a part of a row never: `forget` is for that. Inference tensors
        are sampled in every row, in every call.

        Raises:
            ValueError: a tensor subclass: its memory may not hold the values that it computes with.
        """
        with _lock:
            if self._is_current(tensors):
                return self._current
            torches = {name: leaf for name, leaf in tensors.items() if isinstance(leaf, torch.Tensor)}
            check_ordinary(torches)
            for name, leaf in tensors.items():
                if name not in torches:
                    self._arrays[name] = self._here(name, leaf)
            storages = {name: self._storage(name, leaf) for name, leaf in torches.items()}
            copies = {name: _copy_of(leaf, storages[name]) for name, leaf in torches.items()}
            written = _silently_written(copies, self._turn if self._arrays else None)
            for name, tensor in torches.items():
                copy = copies[name]
                weight = copy.weight() if copy is not None and _model(name) not in written else None
                if weight is None:
                    self._arrays.pop(name, None)  # freed before its successor: the device holds one copy
                    weight = _convert(tensor, storages[name])
                self._arrays[name] = weight
            watched = {name: _Watched.of(leaf, storages[name]) for name, leaf in torches.items()}
            self._watched, self._groups = tensors | watched, _groups(watched)
            self._current, self._changes = dict(self._arrays), _changes[0]
            return self._current

    def release(self) -> None:
        """Hold no array until the next `refresh`."""
        with _lock:
            self._arrays, self._current, self._watched, self._groups, self._changes = {}, {}, {}, [], -1
            self._moved.clear()

    def _is_current(self, tensors: dict[str, Any]) -> bool:
        """Whether neither versions nor the samples of this turn have changed since the last call."""
        if self._changes != _changes[0] or self._watched.keys() != tensors.keys():
            return False
        for name, leaf in tensors.items():
            watched = self._watched[name]
            if not (watched.holds(leaf) if isinstance(watched, _Watched) else watched is leaf):
                return False
        self._turn += 1
        for group in self._groups:
            step, turn = (1, self._turn) if group[0].always else (min(TURNS, len(group)), self._turn // TURNS)
            if not unchanged(one.copy().part(turn) for one in group[self._turn % step :: step]):
                return False
        return True

    def _here(self, name: str, loaded: Weight) -> Weight:
        """A loaded weight on these devices; itself, where it lies there."""
        known = self._moved.get(name)
        if known is None or known[0] is not loaded:
            self._moved.pop(name, None)
            where = self._device if self._partitions is None else self._partitions[name]
            self._moved[name] = known = loaded, relocated(loaded, where)
        return known[1]

    def _storage(self, name: str, tensor: torch.Tensor) -> Storage:
        given = name, tuple(tensor.shape), tensor.dtype, self._device
        if self._partitions is None:
            return Storage(self._rules.choose(*given), self._device)
        return Storage(WeightLayout(Scaled if self._rules.in_codes(*given) else None), self._partitions[name])

    def forget(self, tensors: dict[str, Any]) -> None:
        """Make every engine convert ``tensors`` on its next use of them."""
        with _lock:
            for tensor in tensors.values():
                if isinstance(tensor, torch.Tensor):
                    _copies.pop(tensor, None)
            _changes[0] += 1


def _groups(watched: dict[str, _Watched]) -> list[list[_Watched]]:
    """Weights that are written together: those of a model that are trained; small ones apart."""
    groups = defaultdict(list)
    for name, one in watched.items():
        groups[_model(name), one.trained, one.always].append(one)
    return list(groups.values())


def _model(name: str) -> str:
    """The model of a weight: "target" or "proposer"."""
    return name.partition(".")[0]


def _silently_written(copies: dict[str, _Copy | None], turn: int | None) -> set[str]:
    """The models with a write that torch did not count; without a ``turn``, by all samples."""
    pairs = defaultdict(list)
    for name, copy in copies.items():
        if copy is not None and turn is not None:
            pairs[_model(name)] += [copy.part(turn), copy.part(turn // TURNS)]
        elif copy is not None:  # another engine's, which this one has never compared
            pairs[_model(name)].append((copy.samples, copy.bits))
    return {model for model, views in pairs.items() if not unchanged(views)}
