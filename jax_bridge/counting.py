"""The number of XLA programs that a thread has compiled."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax

_COMPILED = "/jax/core/compile/backend_compile_duration"
_counter = threading.local()


def _count(event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILED:
        count(1)


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """XLA programs compiled so far by this thread, or for it by another."""
    return getattr(_counter, "value", 0)


def count(programs: int) -> None:
    """Count programs of this thread, or that another has compiled for it."""
    _counter.value = compilations() + programs


@contextmanager
def uncounted() -> Iterator[None]:
    """What compiles meanwhile, to measure the machine, is no program of a pair."""
    before = compilations()
    try:
        yield
    finally:
        _counter.value = before
