"""Convolution tails of recurrent layers: whole, or cut into blocks of queries, keys and values.

A chip holds some channels of each block, so a tail cannot lie on a mesh as one array in the model's order. A
state is cut where it enters a mesh, and joined where it leaves one. Only a cut tail is a tuple.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any

import jax
import jax.numpy as jnp
import torch

from torch_dflash.cache.recurrent import RecurrentLayer


def is_recurrent(node: Any) -> bool:
    """Whether ``node`` of a state is a recurrent layer's."""
    return isinstance(node, RecurrentLayer)


def cut_tail(layer: RecurrentLayer, blocks: tuple[int, ...]) -> RecurrentLayer:
    """``layer`` with the channels of its tail in ``blocks`` of these sizes, if any; torch's or JAX's."""
    tail: Any = layer.tail
    if not blocks or tail is None or isinstance(tail, tuple):
        return layer
    ends = [*accumulate(blocks)]
    parts: Any = tuple(tail[:, end - size : end] for size, end in zip(blocks, ends, strict=True))
    return replace(layer, tail=parts)


def whole_tail(layer: RecurrentLayer) -> RecurrentLayer:
    """The inverse of `cut_tail`."""
    tail: Any = layer.tail
    if not isinstance(tail, tuple):
        return layer
    join = torch.cat if isinstance(tail[0], torch.Tensor) else jnp.concatenate
    return replace(layer, tail=join(tail, 1))


def cut_tails(state: Any, blocks: tuple[int, ...]) -> Any:
    """`cut_tail` of each layer of a state, or of a part of one."""
    return _each_layer(lambda layer: cut_tail(layer, blocks), state)


def whole_tails(state: Any) -> Any:
    """The inverse of `cut_tails`."""
    return _each_layer(whole_tail, state)


def _each_layer(change: Any, state: Any) -> Any:
    changed = lambda node: change(node) if is_recurrent(node) else node  # noqa: E731
    return jax.tree.map(changed, state, is_leaf=is_recurrent)
