"""Hooks of a copy, which are the live model's own, and what a forward leaves in values that it reaches."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torch_dflash.targets.closure_values import entries, holders, restore

TORCHS = frozenset(vars(nn.Module()))
"""The attributes that torch gives every module."""


class Weakly:
    """A hook of a live model, in its copy: an engine keeps no model alive by a hook that knows it."""

    def __init__(self, hook: Any):
        self.hook = weakref.ref(hook)

    def __call__(self, *args: Any, **named: Any) -> Any:
        hook = self.hook()
        if hook is None:
            raise RuntimeError(
                "a hook of the target was removed while a text was decoded; keep it to the end of the text, "
                "or call again."
            )
        return hook(*args, **named)


def hooks_of(module: nn.Module) -> list[Any]:
    """The hooks of a module's forward, both kinds; of a copy those of the live model."""
    found = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    return [hook.hook() if isinstance(hook, Weakly) else hook for hook in found]


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
        for hook in hooks_of(module)
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


@contextmanager
def forgetting(root: nn.Module) -> Iterator[None]:
    """Afterwards modules have the attributes and hooks they had, and values in attributes their entries.

    Every program finds in a skeleton what was copied. A tensor that stayed there would be a trace's. One that
    lies more than four deep becomes an input of the next program, which nobody has: the XLA runtime refuses
    that by name.
    """
    modules = [vars(module) for module in root.modules()]
    dicts = [(own, own["_forward_hooks"], own["_forward_pre_hooks"]) for own in modules]
    kept = [(held, dict(held)) for three in dicts for held in three]
    values = [value for own in modules for name, value in own.items() if name not in TORCHS]
    inside = [(one, entries(one)) for value in values for one in holders(value)]
    try:
        yield
    finally:
        for held, before in kept:
            for name in held.keys() - before.keys():
                del held[name]
            held.update(before)  # never emptied: another thread may read it
        for one, before in inside:
            restore(one, before)
