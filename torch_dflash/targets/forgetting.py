"""Every program finds in a skeleton what was copied: what a trace leaves there is taken back."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn

from torch_dflash.targets.guard import TORCHS
from torch_dflash.targets.hooks import entries, holders, restore


@contextmanager
def forgetting(root: nn.Module) -> Iterator[None]:
    """Afterwards modules have the attributes and hooks they had, and values in attributes their entries.

    A tensor that stayed there would be a trace's. One that lies more than four deep becomes an input of the
    next program, which nobody has: the XLA runtime refuses that by name.
    """
    modules = [vars(module) for module in root.modules()]
    kept = [(held, dict(held)) for own in modules for held in (own, *_hooks_of(own))]
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


def _hooks_of(own: dict) -> tuple[dict, dict]:
    return own["_forward_hooks"], own["_forward_pre_hooks"]
