"""Recycles the KV cache of a finished generation, to save zeroing a new one.

On a CPU, zeros for a large ``max_length`` can take longer than a short prompt.
"""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any, ClassVar

import jax

from torch_dflash.cache.dense import StaticLayer
from torch_dflash.state import DecodeState


class Spare:
    """A target's dense caches that no state uses: of at most one runtime, until a state begins on any.

    Their contents are stale, like slots behind a row's length, and hidden by the same masks. Values are
    finite and keys may be NaN, as `torch_dflash.ops.attention.finite_values` leaves both.
    """

    _lock = threading.Lock()
    _holder: ClassVar[weakref.ref[Spare] | None] = None

    def __init__(self):
        self._layers: list[StaticLayer] = []

    def rest(self, state: DecodeState) -> None:
        """Keep the caches of ``state``, which is used no more; after an error they may be deleted."""
        layers = dense_layers(state)
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(layers)):
            return
        # Python may end an abandoned stream while this very thread holds the lock: then keep nothing.
        if Spare._lock.acquire(blocking=False):
            try:
                Spare._empty()
                self._layers, Spare._holder = layers, weakref.ref(self)
            finally:
                Spare._lock.release()

    def take(self) -> list[StaticLayer]:
        """The caches kept here, if any, for a new state; another runtime's are freed."""
        with Spare._lock:
            layers = self._layers
            Spare._empty()
            return layers

    @classmethod
    def _empty(cls) -> None:
        holder = None if cls._holder is None else cls._holder()
        if holder is not None:
            holder._layers = []
        cls._holder = None


def without_caches(state: DecodeState) -> DecodeState:
    """``state`` with empty dense caches. To be traced: the program then makes none."""

    def cut(layer: Any) -> Any:
        return StaticLayer(layer.key[:, :, :0], layer.value[:, :, :0]) if _dense(layer) else layer

    return replace(state, cache=tuple(map(cut, state.cache)))


def dense_layers(state: DecodeState) -> list[StaticLayer]:
    """The target's dense caches. A proposer keeps its own: it may rely on what its `start` made."""
    return [layer for layer in state.cache if _dense(layer)]


def with_caches(state: DecodeState, layers: list[StaticLayer]) -> DecodeState:
    """The inverse of `without_caches`, with ``layers`` as caches."""
    given = iter(layers)
    return replace(state, cache=tuple(next(given) if _dense(layer) else layer for layer in state.cache))


def fit(state: DecodeState, layers: list[StaticLayer]) -> bool:
    """Whether ``layers`` have the types of a ``state`` from `without_caches`: a model may have been cast."""
    wanted = [leaf.dtype for leaf in jax.tree.leaves(dense_layers(state))]
    return wanted == [leaf.dtype for leaf in jax.tree.leaves(layers)]


def _dense(layer: Any) -> bool:
    # Others cannot be stale: a latent layer's model computes from all of its memory.
    return type(layer) is StaticLayer
