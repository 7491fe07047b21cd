"""A `DecodeState` on either side of the border, in mid-generation."""

from __future__ import annotations

from typing import Any

import jax

from jax_bridge.arrays import to_jax, to_torch
from torch_dflash.pytrees import PYTREES

_registered: set[type] = set()


def register_states() -> None:
    """Make every state dataclass of torch_dflash a JAX pytree; those added later, on the next call."""
    for cls, fields in PYTREES:
        if cls not in _registered:
            jax.tree_util.register_dataclass(cls, data_fields=fields, meta_fields=[])
            _registered.add(cls)


def state_to_jax(state: Any, device: Any | None = None) -> Any:
    """The same state, or part of one, with JAX arrays it owns: it may be donated. Lossless; runs no model."""
    register_states()
    return to_jax(state, device=device)


def check_alive(part: Any) -> None:
    """Raise ``ValueError`` if an array of ``part``, a state or a piece of one, was donated: it is gone."""
    for name, leaf in jax.tree_util.tree_flatten_with_path(part)[0]:
        if isinstance(leaf, jax.Array) and leaf.is_deleted():
            raise ValueError(
                f"state{jax.tree_util.keystr(name)} is gone: engine.advance consumed this state. Use the one "
                "that it returned; to keep this one, td.save_state it before engine.advance."
            )


def state_to_torch(state: Any, device="cpu") -> Any:
    """The same state, or part of one, with torch tensors of its own memory. Lossless; runs no model."""
    register_states()
    return to_torch(state, device=device)


register_states()
