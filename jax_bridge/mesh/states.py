"""How a state lies on a mesh: caches and recurrent states head by head, all else on every chip."""

from __future__ import annotations

from typing import Any

import jax
from jax.sharding import NamedSharding

from jax_bridge.mesh.current import WHOLE, P, Slice
from jax_bridge.mesh.shape import ALL
from jax_bridge.mesh.tails import cut_tails, is_recurrent
from jax_bridge.state import is_cache
from torch_dflash.cache.recurrent import FreshState


def shardings(state: Any, own: Slice) -> Any:
    """Where each leaf of a state, or of a part of one, lies."""

    def place(leaf: Any, cached: bool) -> NamedSharding:
        cut = cached and len(leaf.shape) == 4
        return NamedSharding(own.mesh, own.heads(leaf.shape[1])[1] if cut else WHOLE)

    def of_a_node(node: Any) -> Any:
        if recurs(node):
            by_heads = NamedSharding(own.mesh, P(None, ALL) if own.blocks else WHOLE)
            return jax.tree.map(lambda _: by_heads, node)
        return jax.tree.map(lambda leaf: place(leaf, is_cache(node)), node)

    def recurs(node: Any) -> bool:
        return is_recurrent(node) or isinstance(node, FreshState)

    return jax.tree.map(of_a_node, state, is_leaf=lambda node: is_cache(node) or recurs(node))


def keep_in_place(state: Any, own: Slice) -> Any:
    """``state`` of a program as it leaves it. To be traced."""
    state = cut_tails(state, own.blocks)
    return jax.lax.with_sharding_constraint(state, shardings(state, own))
