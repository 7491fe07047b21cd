"""Every program finds in a skeleton what its constructor made: what a trace leaves there is taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from torch_dflash.targets.describe import PLAIN, parts, state_of

_DEEP = 8


@contextmanager
def forgetting(root: nn.Module) -> Iterator[None]:
    """Afterwards modules have the attributes and hooks they had, and what these hold keeps no new tensor.

    A tensor that stayed there would be a trace's, or of another call. Counters and the like in collections
    and objects stay: others may use them, too.
    """
    modules = [vars(module) for module in root.modules()]
    hooks = [own[name] for own in modules for name in ("_forward_hooks", "_forward_pre_hooks")]
    attributes = [(own, dict(own)) for own in (*modules, *hooks)]
    held = [(holder, dict(_entries(holder))) for holder in _holders(modules)]
    try:
        yield
    finally:
        for own, kept in attributes:
            for name in own.keys() - kept.keys():
                del own[name]
            own.update(kept)  # never emptied: another thread may read it
        for holder, kept in held:
            _take_back(holder, kept)


def _holders(modules: list[dict[str, Any]]) -> Iterator[Any]:
    """The collections and objects that attributes hold, and those in them."""
    left = [value for own in modules for name, value in own.items() if name not in TORCHS]
    seen: set[int] = set()
    while left:
        value = left.pop()
        if id(value) not in seen and (inner := _inside(value)) is not None:
            seen.add(id(value))
            left += [held for held in inner if type(held) not in PLAIN]
            if not isinstance(value, tuple | frozenset):
                yield value


def _inside(value: Any) -> list[Any] | None:
    """What lies in a collection or an object of somebody's own; None for what is not looked into."""
    if isinstance(value, dict | list | tuple | set | frozenset | deque):
        return list(dict.values(value) if isinstance(value, dict) else value)
    return None if callable(value) or parts(value) is None else [held for _, held in state_of(value)]


def _entries(holder: Any) -> Iterator[tuple[Any, Any]]:
    """Keys and values, places and entries, or names and attributes; a set's entries are their own keys."""
    if isinstance(holder, dict):
        return iter(list(dict.items(holder)))
    if isinstance(holder, list | deque):
        return enumerate(list(holder))
    if isinstance(holder, set):
        return iter([(id(value), value) for value in holder])
    return iter(list(state_of(holder)))


def _take_back(holder: Any, kept: dict[Any, Any]) -> None:
    """Entries that hold a tensor and are not among ``kept`` go, or are again what stood in their place."""
    new = [
        (key, value) for key, value in _entries(holder) if kept.get(key) is not value and _has_tensor(value)
    ]
    for key, value in reversed(new):
        if isinstance(holder, set):
            set.discard(holder, value)
        elif isinstance(holder, dict):
            dict.__setitem__(holder, key, kept[key]) if key in kept else dict.__delitem__(holder, key)
        elif isinstance(holder, list | deque):
            if key in kept:
                holder[key] = kept[key]
            else:
                del holder[key]
        elif key in kept:
            object.__setattr__(holder, key, kept[key])
        else:
            object.__delattr__(holder, key)


def _has_tensor(value: Any, depth: int = 0) -> bool:
    if isinstance(value, Tensor):
        return True
    return depth < _DEEP and any(_has_tensor(held, depth + 1) for held in _inside(value) or ())


TORCHS = frozenset(vars(nn.Module()))
"""The attributes that torch gives every module."""
