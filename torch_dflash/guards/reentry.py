"""A step that user code asks for from inside of a step of the same engine would wait for itself."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
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
_OURS = ("torch_dflash", "jax_bridge")
_BETWEEN = ("torch", "jaxtyping", "contextlib")  # frames between the round and a user's function
_KINDS = {
    "torch_dflash.processors.host": "a HostProcessor",
    "torch_dflash.processors.own": "a BlockProcessor",
    "torch_dflash.processors.interface": "a processor",
    "torch_dflash.decode": "a proposer",
    "torch_dflash.proposers.base": "a proposer",
    "torch_dflash.requests.stopping": "a stopping criterion",
}
"""What user code is, by the module that calls it."""


@contextmanager
def inside(owner: Any) -> Iterator[None]:
    """While open, `check_outside` refuses ``owner`` in this thread."""
    owners = _owners()
    owners.append(owner)
    try:
        yield
    finally:
        owners.pop()


@contextmanager
def holding(lock: Any) -> Iterator[None]:
    """Hold ``lock``, under which user code may run; other threads wait.

    Raises:
        RuntimeError: this thread holds it already.
    """
    check_outside(lock)
    with lock, inside(lock):
        yield


def check_outside(*owners: Any, why: str = SAME_ENGINE) -> None:
    """Raise ``RuntimeError`` if this thread is `inside` one of ``owners``; ``why`` ends the message."""
    entered = _owners()
    if any(one is owner for one in entered for owner in owners):
        raise RuntimeError(f"{_caller()} {why}")


def _owners() -> list[Any]:
    return _here.__dict__.setdefault("owners", [])


def _caller() -> str:
    """The user's function that asks, by its kind, name, file and line."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _root(frame) in (*_OURS, *_BETWEEN):
        frame = frame.f_back
    found, called = [], frame
    while called is not None and _root(called) not in _OURS:
        found.append(called)
        called = called.f_back
    named = [one for one in found if _root(one) not in _BETWEEN]
    if not named:
        return "user code"
    kind = "user code" if called is None else _KINDS.get(called.f_globals.get("__name__", ""), "user code")
    code = named[-1].f_code
    return f"{kind}, {code.co_qualname} ({code.co_filename}:{named[-1].f_lineno}),"


def _root(frame: FrameType) -> str:
    return frame.f_globals.get("__name__", "").partition(".")[0]
