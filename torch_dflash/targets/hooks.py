"""Hooks of a copy, which are the live model's, and restoring the values that a forward changes."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from torch_dflash.targets.closure_values import entries, holders, restore

TORCHS = frozenset(vars(nn.Module()))
"""The attributes of every torch module."""


class WeakHook:
    """Weak wrapper of a user's hook: the copy must not keep the live model alive."""

    def __init__(self, hook: Any):
        self.hook = weakref.ref(hook)

    def __call__(self, *args: Any, **named: Any) -> Any:
        hook = self.hook()
        if hook is None:
            raise RuntimeError("a hook of the target was removed while a text was decoded; call again.")
        return hook(*args, **named)


def hooks_of(module: nn.Module) -> list[Any]:
    """The pre-hooks and hooks of a module's forward; those of the live model for a copy."""
    found = *module._forward_pre_hooks.values(), *module._forward_hooks.values()
    return [hook.hook() if isinstance(hook, WeakHook) else hook for hook in found]


@contextmanager
def restoring_hooks(model: nn.Module, refuse: bool = True) -> Iterator[None]:
    """While open, a model's copy runs the user's own hooks; on exit, restores the values that they changed.

    Raises:
        ValueError: with ``refuse``, a hook changed a value, such as a list of outputs or a count.
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
            f"{type(model).__name__}.{keeps[0]} carries {hook}, which keeps something from call to call "
            "(its outputs, a count); remove the hook while decoding, or let it keep nothing."
        )


@contextmanager
def restoring_attributes(root: nn.Module) -> Iterator[None]:
    """On exit, restores the modules' attributes and hooks, and the contents of values in attributes.

    Every program starts from the skeleton as copied: a tensor left there would be a tracer. A tracer more
    than four levels deep would be an unknown input of the next program: the XLA runtime refuses it by name.
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
            held.update(before)  # never cleared: another thread may read it
        for one, before in inside:
            restore(one, before)
