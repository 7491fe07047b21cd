"""Copies of what a constructor made, with other torch dtypes in it: those of a loaded model."""

from __future__ import annotations

import copy
from collections import deque
from functools import partial
from types import FunctionType, MappingProxyType
from typing import Any

import torch

from torch_dflash.target.describe import PLAIN, describe, parts, state_of

_DEEP = 16
Made = dict[int, tuple[Any, Any]]
"""By ``id``: a value, which so keeps it, and what stands for it; so what was shared stays shared."""


def with_types_of(own: Any, other: Any, made: Made, depth: int = 0) -> Any:
    """``own`` with the dtypes that stand in their places in ``other``; itself where these are alike.

    Of what cannot be taken apart (a set, a closure, a read-only mapping) ``other`` is taken whole.
    """
    if type(own) is torch.dtype and type(other) is torch.dtype:
        return other
    if type(own) is not type(other) or type(own) in PLAIN or depth > _DEEP:
        return own
    if id(own) not in made:
        made[id(own)] = own, own  # found again inside of itself, it stays
        made[id(own)] = own, _copied(own, other, made, depth + 1)
    return made[id(own)][1]


def _copied(own: Any, other: Any, made: Made, depth: int) -> Any:
    if isinstance(own, set | frozenset | FunctionType | MappingProxyType):
        return other if _has_type(own) and describe(own, type) != describe(other, type) else own
    if isinstance(own, partial):
        pairs = zip((own.func, own.args, own.keywords), (other.func, other.args, other.keywords), strict=True)
        func, args, keywords = (with_types_of(*pair, made, depth) for pair in pairs)
        same = func is own.func and args is own.args and keywords is own.keywords
        return own if same else partial(func, *args, **keywords)
    if isinstance(own, dict):
        before = dict(dict.items(own))
        held = {key: with_types_of(before[key], dict.get(other, key), made, depth) for key in before}
    elif isinstance(own, list | tuple | deque):
        before = dict(enumerate(own))
        theirs = dict(enumerate(other))
        held = {at: with_types_of(value, theirs.get(at), made, depth) for at, value in before.items()}
    elif callable(own) or parts(own) is None:
        return own
    else:
        before: dict[Any, Any] = dict(state_of(own))
        theirs: dict[Any, Any] = dict(state_of(other))
        held = {key: with_types_of(value, theirs.get(key), made, depth) for key, value in before.items()}
    changed = {key: value for key, value in held.items() if value is not before[key]}
    return _replaced(own, held, changed) if changed else own


def _replaced(own: Any, held: dict[Any, Any], changed: dict[Any, Any]) -> Any:
    """A copy of ``own`` with the entries or attributes of ``changed``; itself where there can be none."""
    if isinstance(own, tuple):
        make = getattr(type(own), "_make", type(own))
        return make(held.values())
    try:
        new = copy.copy(own)
    except Exception:  # somebody's own class may do anything
        return own
    for key, value in changed.items():
        if isinstance(own, dict):
            dict.__setitem__(new, key, value)
        elif isinstance(own, list | deque):
            new[key] = value
        else:
            object.__setattr__(new, key, value)
    return new


def _has_type(value: Any) -> bool:
    left, seen = [value], set()
    while left:
        held = left.pop()
        if type(held) is torch.dtype:
            return True
        if id(held) not in seen and len(seen) < 1000:
            seen.add(id(held))
            left += parts(held) or () if type(held) not in PLAIN else ()
    return False
