"""What a forward leaves in values that it reaches: taken out again, and of hooks refused."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType, ModuleType
from typing import Any

from torch import nn

DEEP = 4
_MOST = 1_000


@contextmanager
def keeping_nothing(model: nn.Module, refuse: bool = True) -> Iterator[None]:
    """While open, forwards of a copy of a model run its hooks, which are the user's own objects.

    What a hook has kept is taken out again. ``refuse``: and said.

    Raises:
        ValueError: a hook has kept something, such as the outputs it saw or a count; names hook and module.
    """
    found = [
        (name, hook, [(holder, entries(holder)) for holder in holders(hook)])
        for name, module in model.named_modules()
        for hook in (*module._forward_pre_hooks.values(), *module._forward_hooks.values())
    ]
    keeps = None
    try:
        yield
    finally:
        for name, hook, held in found:
            for holder, before in held:
                if restore(holder, before):
                    keeps = name, hook
    if refuse and keeps is not None:
        hook = getattr(keeps[1], "__qualname__", type(keeps[1]).__name__)
        raise ValueError(
            f"{type(model).__name__}.{keeps[0]} carries {hook}, which keeps something from call to call (its "
            "outputs, a count); remove the hook while decoding, or let it keep nothing."
        )


def holders(value: Any, deep: int = DEEP) -> list[Any]:
    """The lists, dicts, sets, attributes of objects and cells of functions that a value reaches."""
    if isinstance(value, MethodType):
        value = value.__self__
    if isinstance(value, nn.Module | type | ModuleType) or not deep:
        return []
    if isinstance(value, FunctionType):
        cells = [cell for cell in value.__closure__ or () if cell != CellType()]
        return [*cells, *(one for cell in cells for one in holders(cell.cell_contents, deep - 1))]
    if isinstance(value, list | dict | set):
        inner = list(value.values()) if isinstance(value, dict) else list(value)
        return [value, *(one for held in inner[:_MOST] for one in holders(held, deep - 1))]
    own = getattr(value, "__dict__", None)
    return holders(own, deep) if isinstance(own, dict) else []


def entries(holder: Any) -> list[Any]:
    """What a holder holds, for `restore`."""
    if isinstance(holder, CellType):
        return [holder.cell_contents]
    if isinstance(holder, dict):
        return [one for entry in holder.items() for one in entry]
    return list(holder)


def restore(holder: Any, before: list[Any]) -> bool:
    """Put back what `entries` has given; whether anything had changed."""
    now = entries(holder)
    if len(now) == len(before) and not any(map(operator.is_not, now, before)):
        return False
    if isinstance(holder, CellType):
        holder.cell_contents = before[0]
    elif isinstance(holder, list):
        holder[:] = before
    elif isinstance(holder, set):
        holder.intersection_update(before)
        holder.update(before)
    else:
        kept = dict(zip(before[::2], before[1::2], strict=True))
        for key in holder.keys() - kept.keys():
            del holder[key]
        holder.update(kept)
    return True
