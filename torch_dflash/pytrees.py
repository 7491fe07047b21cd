"""Dataclasses of a state, as pytree nodes of torch and of JAX."""

from __future__ import annotations

import dataclasses
from typing import TypeVar

from torch.utils import _pytree as pytree

Registered = TypeVar("Registered", bound=type)
PYTREES: list[tuple[type, list[str]]] = []
"""Every dataclass of a state, with its fields; `jax_bridge` registers them with JAX."""


def register_state(cls: Registered) -> Registered:
    """Make a frozen dataclass a pytree node (class decorator for proposer and cache states)."""
    fields = [field.name for field in dataclasses.fields(cls)]
    pytree.register_dataclass(cls)
    cls.__no_type_check__ = True  # annotations are torch's; on a device the leaves are JAX's arrays
    PYTREES.append((cls, fields))
    return cls
