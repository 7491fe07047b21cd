"""The caches of a generation that has ended: the next one takes them, so that no memory is zeroed for it.

On a CPU zeros for the largest text cost more than a short prompt does: 0.1 s at 8,192 positions.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any, ClassVar

import jax

from torch_dflash.cache.dense import StaticLayer


class Spare:
    """Dense caches that no state uses; of one runtime at most in a process, until any other begins.

    What lies in them is stale, like what lies behind a row's length, and hidden by the same masks. Its values
    are finite, as `torch_dflash.ops.attention.finite_values` keeps all.
    """

    _lock = threading.Lock()
    _holder: ClassVar[weakref.ref[Spare] | None] = None

    def __init__(self):
        self._layers: list[StaticLayer] = []

    def rest(self, state: Any) -> None:
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
        """The caches that rest here, if any do. Those of another runtime are freed: a state begins."""
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


def without_caches(state: Any) -> Any:
    """``state``, its dense caches of no length. To be traced: they are not made then."""

    def cut(node: Any) -> Any:
        return StaticLayer(node.key[:, :, :0], node.value[:, :, :0]) if _dense(node) else node

    return jax.tree.map(cut, state, is_leaf=_dense)


def dense_layers(state: Any) -> list[StaticLayer]:
    """The dense caches of ``state``, in their order."""
    return [node for node in jax.tree.leaves(state, is_leaf=_dense) if _dense(node)]


def with_caches(state: Any, layers: list[StaticLayer]) -> Any:
    """What `without_caches` made, with ``layers`` in their places."""
    given = iter(layers)
    return jax.tree.map(lambda node: next(given) if _dense(node) else node, state, is_leaf=_dense)


def fit(state: Any, layers: list[StaticLayer]) -> bool:
    """Whether ``layers`` are of the types that `without_caches` left: a model may have been cast."""
    wanted = [leaf.dtype for leaf in jax.tree.leaves(dense_layers(state))]
    return wanted == [leaf.dtype for leaf in jax.tree.leaves(layers)]


def _dense(node: Any) -> bool:
    # Others are not for stale memory: a latent layer's model computes from all of it.
    return type(node) is StaticLayer
