"""How a state lies on a mesh: caches head by head, all else on every chip."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_bridge.mesh.current import WHOLE, Slice
from jax_bridge.state import is_cache


def shardings(state: Any, own: Slice) -> Any:
    """Where each leaf of a state, or of a part of one, lies."""

    def place(leaf: Any, cached: bool) -> NamedSharding:
        cut = cached and len(leaf.shape) == 4
        return NamedSharding(own.mesh, own.heads(leaf.shape[1])[1] if cut else WHOLE)

    def of_a_node(node: Any) -> Any:
        return jax.tree.map(lambda leaf: place(leaf, is_cache(node)), node)

    return jax.tree.map(of_a_node, state, is_leaf=is_cache)


def keep_in_place(state: Any, own: Slice) -> Any:
    """``state`` of a program as it leaves it. To be traced."""
    return jax.lax.with_sharding_constraint(state, shardings(state, own))
