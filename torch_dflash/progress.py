"""What takes long is said on stderr: bars, and a line for what compiles unasked."""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

from tqdm.auto import tqdm

PATIENCE = 1.0
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
# Python prints a logger's warnings on stderr, in a notebook too, until the user says otherwise.
_log = logging.getLogger("torch_dflash")


def progress_bar(progress: bool | None, **options: Any) -> tqdm:
    """A tqdm bar on stderr. ``progress``: shown or not; None: shown where stderr is a terminal."""
    return tqdm(disable=None if progress is None else not progress, **options)


def unseen(progress: bool | None, bar: tqdm) -> bool:
    """Whether lines take the place of a ``bar`` that no terminal shows; not where silence was asked for."""
    return progress is None and bar.disable


def announce(what: str | None) -> threading.Timer:
    """Log ``what`` as a warning of the logger "torch_dflash", unless it is cancelled within a second.

    Nothing is said for None, or where a bar says it (`quiet`).
    """
    timer = threading.Timer(PATIENCE, _log.warning, ("torch-dflash: %s ...", what))
    timer.daemon = True
    if what is not None and not _quiet.get():
        timer.start()
    return timer


def say(what: str) -> None:
    """Log ``what`` as a warning of the logger "torch_dflash", in one line."""
    _log.warning("torch-dflash: %s", what)


@contextmanager
def announced(what: str | None) -> Iterator[None]:
    """`announce` for as long as this is open."""
    timer = announce(what)
    try:
        yield
    finally:
        timer.cancel()


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """While open, if ``wanted``, what this thread starts is not announced.

    A bar says it, or the user wants no word.
    """
    token = _quiet.set(wanted or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(token)
