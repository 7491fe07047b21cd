"""Progress on stderr: bars, status lines, lines for slow compilations; silent while `quiet`."""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from tqdm import tqdm

PATIENCE = 1.0
"""Seconds after which a slow step is shown."""
LONG = 3.0
"""Seconds after which the compilation of a program is logged where no terminal shows a bar."""
TICK, LULL = 0.2, 0.5
"""Seconds between two updates of a bar of programs, and without any program until the bar ends."""
_quiet: ContextVar[bool] = ContextVar("quiet", default=False)
# Python prints a logger's warnings on stderr, in a notebook too, until the user says otherwise.
_log = logging.getLogger("torch_dflash")


def coloured(stream: TextIO) -> bool:
    """Whether ``stream`` shows colours: a terminal does, unless the environment sets NO_COLOR."""
    return stream.isatty() and not os.environ.get("NO_COLOR")


def print_status(line: str) -> None:
    """Print a line of a command on stderr, not while `quiet`."""
    if not _quiet.get():
        print(line, file=sys.stderr, flush=True)


def progress_bar(progress: bool | None, **options: Any) -> tqdm:
    """A tqdm bar on stderr, none while `quiet`. ``progress``: show it; None: show it at a terminal."""
    from tqdm.auto import tqdm

    shown = False if _quiet.get() else progress
    return tqdm(disable=None if shown is None else not shown, **options)


@contextmanager
def lasting(progress: bool | None, what: str, count: int, unit: str) -> Iterator[tqdm]:
    """A bar for ``count`` steps of ``what``, with running seconds; a line at each end without a terminal.

    ``progress``: as in `progress_bar`; False shows no lines either.
    """
    over = threading.Event()

    def tick() -> None:
        while not over.wait(TICK):
            bar.refresh()

    with progress_bar(progress, total=count, unit=unit, desc=what) as bar:
        if not bar.disable:
            threading.Thread(target=tick, daemon=True).start()
        try:
            with announced(what if progress is None and bar.disable else None):
                yield bar
        finally:
            over.set()


def warn(message: str) -> None:
    """Log ``message`` as a warning of the logger "torch_dflash", in one line; not while `quiet`."""
    if not _quiet.get():
        _log.warning("torch-dflash: %s", message)


@contextmanager
def announced(what: str | None, after: float | None = None, more: Callable[[], str] = str) -> Iterator[None]:
    """Log ``what`` if it lasts a second (``after``), and its time and ``more`` at the end; None: nothing."""
    started, begun = time.monotonic(), threading.Event()

    def begin() -> None:
        begun.set()
        _log.warning("torch-dflash: %s ...", what)

    timer = threading.Timer(PATIENCE if after is None else after, begin)
    timer.daemon = True
    if what is not None and not _quiet.get():
        timer.start()
    try:
        yield
    finally:
        timer.cancel()
        if begun.is_set():
            _log.warning("torch-dflash: %s: %.1f s%s", what, time.monotonic() - started, more())


class Compiling:
    """Shows programs that compile: after a second, a bar with n of m at a terminal.

    One thread shows all programs; those that follow each other closely share the bar. Without a terminal, a
    program that takes longer than `LONG` has a line at each end.

    Args:
        sizes: of the programs, as in "512 positions, batch 1"; None: nothing is shown.
    """

    def __init__(self, sizes: str | None):
        self._sizes, self._lock = sizes, threading.Lock()
        self._waiting: list[str] = []
        self._count, self._ended = 0, 0.0
        self._watcher: threading.Thread | None = None

    def start(self, what: str) -> Callable[[], None]:
        """Note that the program ``what`` compiles; call the result when it is done or has failed."""
        if self._sizes is None or _quiet.get():
            return lambda: None
        shown = sys.stderr is not None and sys.stderr.isatty()
        lines = announced(None if shown else f"compiling {what} ({self._sizes})", LONG, self._so_far)
        lines.__enter__()
        with self._lock:
            self._waiting.append(what)
            self._count += 1
            if shown and self._watcher is None:
                self._watcher = threading.Thread(target=self._watch, daemon=True)
                self._watcher.start()

        def end() -> None:
            with self._lock:
                self._waiting.remove(what)
                self._ended = time.monotonic()
            lines.__exit__(None, None, None)

        return end

    def _so_far(self) -> str:
        return f", {self._count - len(self._waiting)} of {self._count} programs so far"

    def join(self) -> None:
        """Wait until the bar has ended."""
        if (watcher := self._watcher) is not None:
            watcher.join()

    def _watch(self) -> None:
        bar = None
        time.sleep(PATIENCE)
        while True:
            with self._lock:
                waiting, count = list(self._waiting), self._count
                if not waiting and (bar is None or time.monotonic() - self._ended > LULL):
                    self._watcher, self._count = None, 0
                    break
            if bar is None:
                bar = progress_bar(None, total=count, unit="program", leave=False)
            bar.total, bar.n = count, count - len(waiting)
            bar.set_description(waiting[0] if waiting else "compiled")
            time.sleep(TICK)
        if bar is not None:
            bar.close()


@contextmanager
def quiet(wanted: bool) -> Iterator[None]:
    """While open, if ``wanted``, this thread shows no bars, lines or warnings."""
    token = _quiet.set(wanted or _quiet.get())
    try:
        yield
    finally:
        _quiet.reset(token)
