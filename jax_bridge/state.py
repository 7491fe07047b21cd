"""Converts a `DecodeState` between torch and JAX in mid-generation."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from jax_bridge.arrays import to_jax, to_torch
from jax_bridge.tails import whole_tails
from torch_dflash.cache.ring import RingLayer
from torch_dflash.cache.spec import ByPosition
from torch_dflash.pytrees import PYTREES

_registered: set[type] = set()


def register_states() -> None:
    """Make every state dataclass of torch_dflash a JAX pytree; later ones on the next call."""
    for cls, fields in PYTREES:
        if cls not in _registered:
            jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=[])
            _registered.add(cls)


def state_to_jax(state: Any, device: Any | None = None) -> Any:
    """The same state, or part of one, with JAX arrays it owns: it may be donated. Lossless; runs no model."""
    register_states()
    return to_jax(whole_tails(state), device=device)


def check_alive(part: Any) -> None:
    """Raise ``ValueError`` if an array of a state, or of a part of one, was donated."""
    for name, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"state{jax.tree_util.keystr(name)} is gone: engine.advance consumed this state. Use the one "
                "that it returned; to keep this one, td.save_state it before engine.advance."
            )


def state_to_torch(state: Any, device="cpu") -> Any:
    """The same state, or part of one, as new torch tensors. Lossless; runs no model."""
    register_states()
    return to_torch(whole_tails(state), device=device)


def widened(state: Any) -> Any:
    """``state`` with float32 caches, as a CPU decodes with it.

    XLA's CPU compiler has neither products nor updates of half-precision caches: it would convert them whole
    in every round. Float32 holds every half-precision value exactly.
    """

    def widen(leaf: Any) -> Any:
        return leaf.astype(jnp.float32) if leaf.dtype in (jnp.bfloat16, jnp.float16) else leaf

    def of_a_cache(node: Any) -> Any:
        return jax.tree.map(widen, node) if is_cache(node) else node

    return jax.tree.map(of_a_cache, state, is_leaf=is_cache)


def is_cache(node: Any) -> bool:
    """Whether ``node`` of a state is a layer's cache of keys and values."""
    return isinstance(node, ByPosition | RingLayer)


register_states()
