"""Refuses a step that user code starts inside a step of the same engine: it would wait for itself."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

SAME_ENGINE = (
    "calls the engine from inside of a step of the same engine, which has to end first: the call would wait "
    "for ever. Call another engine (torch_dflash.compile), or call this one from outside of its steps, as a "
    "streamer or the reader of a stream may."
)
OWN_STEP = (
    "makes a call with itself among the processors: from inside of its own step that call would ask it "
    "again, without end. Leave it out of that call's processors, or call from outside of the steps."
)
_here = threading.local()


@contextmanager
def entering(owner: Any) -> Iterator[None]:
    """While open, `check_outside` refuses ``owner`` in this thread."""
    owners = _owners()
    owners.append(owner)
    try:
        yield
    finally:
        owners.pop()


@contextmanager
def holding(lock: Any) -> Iterator[None]:
    """Hold ``lock`` while user code may run; other threads wait.

    Raises:
        RuntimeError: this thread holds ``lock`` already.
    """
    check_outside(lock)
    with lock, entering(lock):
        yield


def check_outside(*owners: Any, why: str = SAME_ENGINE) -> None:
    """Raise ``RuntimeError`` if this thread has entered one of ``owners``; ``why`` ends the message."""
    entered = _owners()
    if any(one is owner for one in entered for owner in owners):
        raise RuntimeError(f"user code {why}")


def _owners() -> list[Any]:
    return _here.__dict__.setdefault("owners", [])
