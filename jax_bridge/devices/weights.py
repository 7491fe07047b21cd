"""The user's live torch weights as JAX arrays: converted once for all engines, refreshed when they change."""

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
from jax_bridge.devices.samples import SAMPLES, check_ordinary, on_host, places, unchanged
from jax_bridge.mesh.cut import Way
from jax_bridge.mesh.put import moved, place
from jax_bridge.weights.forms import Weight
from jax_bridge.weights.layout import Form, Forms, keep

Fingerprint = tuple


@dataclass(frozen=True, eq=False)
class _Converted:
    """What was made of a tensor. The weight is weak: it lives while an engine uses it.

    ``places`` is a view, so the storage is held: its address cannot be given to new values that would look
    unchanged. It is looked at in ``parts``.
    """

    mark: Fingerprint
    places: Any
    bits: np.ndarray
    parts: int
    weight: weakref.ref

    def part(self, turn: int) -> tuple[Any, np.ndarray]:
        """Bits that are looked at in a turn, and those that were there."""
        return self.places[turn % self.parts :: self.parts], self.bits[turn % self.parts :: self.parts]


# By live tensor, weakly, and by form: engines of one model (lengths, batch sizes) use the same arrays.
_converted: WeakTensorKeyDictionary = WeakTensorKeyDictionary()
_lock = threading.Lock()
_changes = [0]
"""Conversions so far, and weights that were forgotten: while none comes, what an engine has is up to date."""
TURNS = 8
"""Calls in which all large weights are looked at, some in each; of a weight all rows in as many squared."""
SMALL = 1 << 16
"""Bytes of a weight that is looked at in every call."""


def fingerprint(tensor: torch.Tensor) -> Fingerprint:
    """Changes with every write that torch's version counter sees. Inference tensors have no counter."""
    version = None if tensor.is_inference() else tensor._version
    view = tensor.is_neg(), tensor.is_conj()
    return tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride(), view


class _Mark(NamedTuple):
    """What every call compares of a tensor: less than its `fingerprint`, of hundreds of tensors."""

    tensor: weakref.ref
    made: Any  # weakly
    counted: bool
    always: bool
    now: tuple

    @classmethod
    def of(cls, tensor: torch.Tensor, form: Kept | Way) -> _Mark:
        counted, made = not tensor.is_inference(), weakref.ref(_converted[tensor][form])
        return cls(weakref.ref(tensor), made, counted, _always(tensor), _glance(tensor, counted))


def _always(tensor: torch.Tensor) -> bool:
    """Whether a weight is looked at in every call: it is small, or a table, of which rows are written."""
    tall = tensor.ndim == 2 and tensor.shape[0] > 4 * tensor.shape[1]
    return tall or tensor.nbytes <= SMALL or tensor.is_inference()


def _glance(tensor: torch.Tensor, counted: bool) -> tuple:
    version = tensor._version if counted else None
    where = tensor.data_ptr(), version, tensor.dtype, tensor.shape, tensor.stride(), tensor.is_neg()
    return *where, tensor.requires_grad


class Kept(NamedTuple):
    """How a weight is kept whole, and on which device."""

    form: Form
    device: Any


def _forms_of(tensor: torch.Tensor) -> dict[Kept | Way, _Converted]:
    """What was made of this tensor and an engine still uses, by form and place."""
    known = _converted.get(tensor) or {}
    return {form: made for form, made in known.items() if made.weight() is not None}


def _known(tensor: Any, form: Kept | Way) -> _Converted | None:
    """What was made of this tensor, if no counted write came since."""
    known = (_converted.get(tensor) or {}).get(form)
    if known is None or known.weight() is None or known.mark != fingerprint(tensor):
        return None
    return known


def _convert(tensor: torch.Tensor, form: Kept | Way) -> Weight:
    mark, at = fingerprint(tensor), places(tensor)
    bits, at = on_host(at).copy(), on_host(at) if at.is_cpu else at
    parts = 1 if tensor.is_inference() else max(1, min(TURNS**2, len(bits) // (4 * SAMPLES)))
    if isinstance(form, Way):
        weight = place(tensor.detach().__getitem__, tuple(tensor.shape), form)
    else:
        weight = keep(tensor.detach(), form.form, place=form.device)
    _changes[0] += 1
    _converted[tensor] = _forms_of(tensor) | {form: _Converted(mark, at, bits, parts, weakref.ref(weight))}
    return weight


class Weights:
    """The arrays one engine uses, by name.

    Args:
        forms: the formats that each weight may have (`jax_bridge.weights.layout`), or its place on a mesh.
        device: of those that are kept whole; unset: JAX's default.

    Arrays that were loaded on other devices, those of the first replica, are copied once.
    """

    def __init__(self, forms: Forms | dict[str, Way], device: Any = None):
        self._forms, self._device = forms, device or default_device()
        self._arrays: dict[str, Weight] = {}
        self._copies: dict[str, tuple[Weight, Weight]] = {}  # what was loaded, and what was made of it here
        self._current: dict[str, Weight] = {}
        self._marks: dict[str, _Mark | Weight] = {}  # of each weight, what `_is_current` compares
        self._groups: list[list[_Mark]] = []  # of which a part is looked at in each call
        self._changes, self._turn = -1, 0

    def refresh(self, tensors: dict[str, Any]) -> dict[str, Weight]:
        """Arrays for ``tensors``, the same dict while nothing changes; only changed ones are converted.

        Seen are all writes that torch counts: in place, ``load_state_dict``, ``detach()``, also under
        ``torch.no_grad()`` and ``torch.inference_mode()``. Of those it does not count (fused optimisers,
        ``.data``, numpy views) one is seen if it changes a bit in the `places` that are looked at: in a call,
        some of each small weight's and table's (an embedding, a head), and of every eighth other weight's. If
        one is seen, or a write was counted, all weights are looked at, and those of a model with a silent
        write are converted. A write to few large weights may be seen `TURNS` calls late, one to a row as many
        squared, or cubed where it is no table's, one to a part of a row never: `forget` is for that.
        Inference tensors are looked at in every row, in every call.

        Raises:
            ValueError: a tensor is of a class of its own: what it computes is not in its memory.
        """
        with _lock:
            if self._is_current(tensors):
                return self._current
            torches = {name: leaf for name, leaf in tensors.items() if isinstance(leaf, torch.Tensor)}
            check_ordinary(torches)
            for name, leaf in tensors.items():
                if name not in torches:
                    self._arrays[name] = self._here(name, leaf)
            forms = {name: self._form(name, leaf) for name, leaf in torches.items()}
            known = {name: _known(leaf, forms[name]) for name, leaf in torches.items()}
            doubted = _doubted(known, self._turn)
            for name, tensor in torches.items():
                made = known[name]
                weight = made.weight() if made is not None and _part(name) not in doubted else None
                if weight is None:
                    self._arrays.pop(name, None)  # freed before its successor: the device holds one copy
                    weight = _convert(tensor, forms[name])
                self._arrays[name] = weight
            marks = {name: _Mark.of(leaf, forms[name]) for name, leaf in torches.items()}
            self._marks, self._groups = tensors | marks, _groups(marks)
            self._current, self._changes = dict(self._arrays), _changes[0]
            return self._current

    def release(self) -> None:
        """Hold no array until the next `refresh`."""
        with _lock:
            self._arrays, self._current, self._marks, self._groups, self._changes = {}, {}, {}, [], -1
            self._copies.clear()

    def _is_current(self, tensors: dict[str, Any]) -> bool:
        """Whether nothing was written since the last call, as far as a look at a part of them tells."""
        if self._changes != _changes[0] or self._marks.keys() != tensors.keys():
            return False
        for name, leaf in tensors.items():
            mark = self._marks[name]
            if not isinstance(mark, _Mark):
                if mark is not leaf:
                    return False
            elif mark.tensor() is not leaf or mark.now != _glance(leaf, mark.counted):
                return False
        self._turn += 1
        for group in self._groups:
            step, turn = (1, self._turn) if group[0].always else (min(TURNS, len(group)), self._turn // TURNS)
            if not unchanged(one.made().part(turn) for one in group[self._turn % step :: step]):
                return False
        return True

    def _here(self, name: str, loaded: Weight) -> Weight:
        """A loaded weight on these devices, as it is where it lies there."""
        known = self._copies.get(name)
        if known is None or known[0] is not loaded:
            self._copies.pop(name, None)
            way = self._forms[name] if isinstance(self._forms, dict) else self._device
            self._copies[name] = known = loaded, moved(loaded, way)
        return known[1]

    def _form(self, name: str, tensor: torch.Tensor) -> Kept | Way:
        if isinstance(self._forms, dict):
            return self._forms[name]
        form = self._forms.choose(name, tuple(tensor.shape), tensor.dtype, self._device)
        return Kept(form, self._device)

    def forget(self, tensors: dict[str, Any]) -> None:
        """Have every engine convert ``tensors`` on its next use of them."""
        with _lock:
            for tensor in tensors.values():
                if isinstance(tensor, torch.Tensor):
                    _converted.pop(tensor, None)
            _changes[0] += 1


def _groups(marks: dict[str, _Mark]) -> list[list[_Mark]]:
    """Weights that are written together: of a model, those that are trained; small ones apart."""
    groups = defaultdict(list)
    for name, mark in marks.items():
        groups[_part(name), mark.now[-1], mark.always].append(mark)
    return list(groups.values())


def _part(name: str) -> str:
    """Which model a weight belongs to: "target" or "proposer"."""
    return name.partition(".")[0]


def _doubted(known: dict[str, _Converted | None], turn: int) -> set[str]:
    """The models of which a weight was written without being counted."""
    pairs = defaultdict(list)
    for name, made in known.items():
        if made is not None:
            pairs[_part(name)] += [made.part(turn), made.part(turn // TURNS)]
    return {part for part, views in pairs.items() if not unchanged(views)}
