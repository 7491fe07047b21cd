"""Engines behind `generate`: one per (target, drafter, options), freed with either model."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

from torch_dflash.checkpoints import check_drafter
from torch_dflash.engine import Engine

ENGINES_PER_PAIR = 8


class _NoDrafter:
    """Stands for ``drafter=None`` where a weak key is needed."""


_NO_DRAFTER = _NoDrafter()
_lock = threading.Lock()
# target -> drafter -> options -> engine. An engine refers to its models weakly, so no value here leads
# back to its key, and deleting a model frees the engine and its device arrays.
_engines: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, OrderedDict]] = (
    weakref.WeakKeyDictionary()
)


def cached_engine(target, drafter, **options: Any) -> Engine:
    """The engine for these arguments (as `Engine`), built at most once while it stays in use."""
    check_drafter(drafter)
    key = tuple(sorted(options.items()))
    with _lock:
        by_drafter = _engines.setdefault(target, weakref.WeakKeyDictionary())
        entries = by_drafter.setdefault(_NO_DRAFTER if drafter is None else drafter, OrderedDict())
        if key not in entries:
            entries[key] = Engine(target, drafter, **options)
            while len(entries) > ENGINES_PER_PAIR:
                entries.popitem(last=False)
        entries.move_to_end(key)
        return entries[key]
