"""Engines behind `generate`: one per (target, drafter, options), freed with either model."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

from torch_dflash.checks import check_target
from torch_dflash.engine.engine import Engine
from torch_dflash.engine.replicas import engine_of
from torch_dflash.guards.reentry import holding
from torch_dflash.proposers.choose import check_drafter
from torch_dflash.proposers.composed import holds_tensors, inner_of, key_of
from torch_dflash.requests.options import EngineOptions
from torch_dflash.targets.weights import LoadedTarget, model_of

# As many as a chat of 32,768 positions comes to need (`torch_dflash/chat.py`), and some for other options.
# Engines share the weights: one more is its programs and a model without tensors.
ENGINES_PER_PAIR = 24


class _Value:
    """Weak-dictionary key for drafters that compare by value."""


_plain, _keyed = _Value(), _Value()  # no drafter; all proposers with a ``key``, together
_lock = threading.Lock()
# target -> drafter -> options -> engine. An engine refers to its models weakly, so no value here leads
# back to its key, and deleting a model frees the engine and its device arrays.
_engines: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, OrderedDict]] = (
    weakref.WeakKeyDictionary()
)


def cached_engine(target: Any, drafter: Any, options: EngineOptions) -> Engine:
    """The engine for these arguments (as `Engine`), built at most once while it stays in use."""
    check_drafter(drafter)
    model = model_of(target)
    check_target(model)
    inner = inner_of(drafter)
    value = _value(inner)
    with holding(_lock):  # a user's proposer may run while an engine is built
        known = _plain if inner is None else inner if value is None else _keyed
        owner = target if isinstance(target, LoadedTarget) else model  # an adapter's wrapper may be made anew
        by_drafter = _engines.setdefault(owner, weakref.WeakKeyDictionary())
        entries = by_drafter.setdefault(known, OrderedDict())
        key = options, value, key_of(drafter)
        if key in entries:
            entries[key].follow()
        else:
            entries[key] = engine_of(target, drafter, options)
            while len(entries) > ENGINES_PER_PAIR:
                entries.popitem(last=False)
        entries.move_to_end(key)
        return entries[key]


def _value(drafter: Any) -> Any:
    """A key that equal drafters share; None for a drafter with tensors, which an engine refers to."""
    key = getattr(drafter, "key", None)
    return None if key is None or holds_tensors(drafter) else (type(drafter), key)
