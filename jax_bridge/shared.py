"""Steps that every layer takes: traced once a program instead of once a layer."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any

import jax

_known: ContextVar[dict[Any, Callable] | None] = ContextVar("known", default=None)


@contextmanager
def sharing() -> Iterator[None]:
    """While open, `once` shares traces. They end with it: the next is traced anew."""
    token = _known.set({})
    try:
        yield
    finally:
        _known.reset(token)


def once(function: Callable, *args: Any, **static: Any) -> Any:
    """``function(*args, **static)``, for a pure function of JAX arrays and hashable ``static``.

    Calls alike in shapes, dtypes and ``static`` share one trace, as a function of the program that XLA puts
    in at each call: what runs is the same.
    """
    known = _known.get()
    if known is None:
        return function(*args, **static)
    key = function, tuple(sorted(static.items()))
    if key not in known:
        known[key] = jax.jit(partial(function, **static))
    return known[key](*args)
