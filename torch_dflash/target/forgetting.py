"""Every pass finds in a skeleton what its constructor made: what a forward keeps for itself is taken back."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torch_dflash.target.describe import vars_of
from torch_dflash.target.origins import is_authors


@contextmanager
def forgetting(holders: list[Any]) -> Iterator[None]:
    """Afterwards `holders_of` a model hold what they did, whatever ran.

    A tensor that a forward left there would be a trace's, or of another call.
    """
    before = [(holder, holder.copy()) for holder in holders]
    try:
        yield
    finally:
        for holder, kept in before:
            _restore(holder, kept)


def holders_of(root: nn.Module) -> list[Any]:
    """Where a forward may keep something: the modules' attributes, and what these hold in turn.

    That is collections, and the attributes of objects of somebody's own classes. torch's own collections are
    left out: it refuses new weights by name, and hooks are ours.
    """
    found: list[Any] = [vars(module) for module in root.modules()]
    seen = set(map(id, found))
    for holder in found:  # grows meanwhile
        values = (
            [value for name, value in holder.items() if name not in _TORCHS]
            if type(holder) is dict
            else holder
        )
        for value in values:
            inner = value if type(value) in _KINDS else _own_vars(value)
            if inner is not None and id(inner) not in seen:
                seen.add(id(inner))
                found.append(inner)
    return found


def _own_vars(value: Any) -> dict[str, Any] | None:
    kind = type(value)
    if kind.__module__ == "builtins" or issubclass(kind, nn.Module | type) or not is_authors(kind):
        return None
    return vars_of(value)


def _restore(holder: Any, kept: Any) -> None:
    """Never empties a dict or a set: another thread may read it."""
    if isinstance(holder, dict):
        for name in holder.keys() - kept.keys():
            del holder[name]
        holder.update(kept)
    elif isinstance(holder, set):
        holder |= kept
        holder &= kept
    elif len(holder) != len(kept) or any(a is not b for a, b in zip(holder, kept, strict=True)):
        holder.clear()
        holder.extend(kept)


_KINDS = (dict, list, set, deque)
_TORCHS = frozenset(vars(nn.Module()))
