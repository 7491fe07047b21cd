"""The target's caches of a generation that has ended: the next one takes them, so no new ones are zeroed.

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
    """A target's dense caches that no state uses: of one runtime at most, until a state begins on any.

    What lies in them is stale, like what lies behind a row's length, and hidden by the same masks. The values
    are finite, and keys may be NaN, as `torch_dflash.ops.attention.finite_values` leaves both.
    """

    _lock = threading.Lock()
    _holder: ClassVar[weakref.ref[Spare] | None] = None

    def __init__(self):
        self._layers: list[StaticLayer] = []

    def rest(self, state: DecodeState) -> None:
        """Keep the caches of ``state``, which is not used again; after an error it may have none left."""
        layers = dense_layers(state)
        if any(leaf.is_deleted() for leaf in jax.tree.leaves(layers)):
            return
        # Python may end a stream that was left while this very thread has the lock: then nothing is kept.
        if Spare._lock.acquire(blocking=False):
            try:
                Spare._empty()
                self._layers, Spare._holder = layers, weakref.ref(self)
            finally:
                Spare._lock.release()

    def take(self) -> list[StaticLayer]:
        """The caches that rest here, if any do, for a state that begins; another runtime's are freed."""
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
    """``state``, its dense caches of no length. To be traced: they are not made then."""

    def cut(layer: Any) -> Any:
        return StaticLayer(layer.key[:, :, :0], layer.value[:, :, :0]) if _dense(layer) else layer

    return replace(state, cache=tuple(map(cut, state.cache)))


def dense_layers(state: DecodeState) -> list[StaticLayer]:
    """The target's dense caches. A proposer may count on what its `start` made, so it keeps its state."""
    return [layer for layer in state.cache if _dense(layer)]


def with_caches(state: DecodeState, layers: list[StaticLayer]) -> DecodeState:
    """What `without_caches` made, with ``layers`` in their places."""
    given = iter(layers)
    return replace(state, cache=tuple(next(given) if _dense(layer) else layer for layer in state.cache))


def fit(state: DecodeState, layers: list[StaticLayer]) -> bool:
    """Whether ``layers`` are of the types that `without_caches` left: a model may have been cast."""
    wanted = [leaf.dtype for leaf in jax.tree.leaves(dense_layers(state))]
    return wanted == [leaf.dtype for leaf in jax.tree.leaves(layers)]


def _dense(layer: Any) -> bool:
    # Others are not for stale memory: a latent layer's model computes from all of it.
    return type(layer) is StaticLayer
