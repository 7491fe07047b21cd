"""Engines behind `generate`: one per (target, drafter, options), freed with either model."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict
from typing import Any

from torch_dflash.checkpoints import check_drafter
from torch_dflash.checks import check_target
from torch_dflash.code import code_of
from torch_dflash.engine import Engine
from torch_dflash.loaded import model_of
from torch_dflash.unmodified import settings

# As many as a chat of 32,768 positions comes to need (`torch_dflash.capacity`), and some for other options.
# Engines share the weights: one more is its programs and a model without tensors.
ENGINES_PER_PAIR = 24


class _Value:
    """Stands in the weak keys for a drafter that is known by value: None, or a proposer with a ``key``."""


_values: dict[Any, _Value] = {}
_lock = threading.Lock()
# target -> drafter -> options -> engine. An engine refers to its models weakly, so no value here leads
# back to its key, and deleting a model frees the engine and its device arrays.
_engines: weakref.WeakKeyDictionary[Any, weakref.WeakKeyDictionary[Any, OrderedDict]] = (
    weakref.WeakKeyDictionary()
)


def cached_engine(target, drafter, **options: Any) -> Engine:
    """The engine for these arguments (as `Engine`), built at most once while it stays in use."""
    check_drafter(drafter)
    model = model_of(target)
    check_target(model)
    for name, value in options.items():
        try:
            hash(value)
        except TypeError:
            raise ValueError(f"{name}={value!r}: pass one value, not a {type(value).__name__}.") from None
    # A resized vocabulary or a changed config makes other programs of the same model.
    configs = settings(model.config), settings(getattr(drafter, "config", None))
    key = (
        model.get_input_embeddings().weight.shape,
        repr(configs),
        code_of(model),
        *sorted(options.items()),
    )
    value = None if drafter is None else getattr(drafter, "key", None)
    with _lock:
        known = drafter if drafter is not None and value is None else _values.setdefault(value, _Value())
        by_drafter = _engines.setdefault(target, weakref.WeakKeyDictionary())
        entries = by_drafter.setdefault(known, OrderedDict())
        if key not in entries:
            entries[key] = Engine(target, drafter, **options)
            while len(entries) > ENGINES_PER_PAIR:
                entries.popitem(last=False)
        entries.move_to_end(key)
        return entries[key]
