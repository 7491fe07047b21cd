"""Ends a process, with a message, when another one ends, fails or stops answering.

A process that waits for another in a program on the devices cannot be woken. JAX itself ends it by a signal,
with a stack trace, when the other's heartbeats stop: after 100 seconds if nothing else is said.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from jax_bridge.hosts.store import Store

BEAT = 1.0
"""Seconds between two signs of life."""
SILENT = 60
"""Beats of its own that a process waits for another's. One that was stopped itself has not waited."""
FAREWELL = 5
"""Seconds for which what goes wrong is told to the others."""
DAY = 24 * 3600
OVER = "over"
STATUS = 1
"""With which a process ends that another one has ended."""


class Watch:
    """Three threads: one gives signs of life, one judges the others', one hears what they say.

    Args:
        store: what all processes see.
        end: ends this process, with a message.
    """

    def __init__(self, store: Store, end: Callable[[str], None] | None = None):
        self._store, self._end = store, end or self._exit
        self._others = [one for one in range(store.count) if one != store.process]
        self._over, self._answers = threading.Event(), 0
        self._beats: dict[int, str] = {}
        self._busy: list[str] = []
        self.left: str | None = None

    def start(self) -> None:
        """Watch until Python ends."""
        kinds = (self._live, self._judge, self._listen)
        self._threads = [threading.Thread(target=kind, daemon=True) for kind in kinds]
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)  # before JAX's own, which was registered before

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """While open, a process that ends is missed."""
        self._busy.append(what)
        try:
            yield
        finally:
            self._busy.remove(what)

    def leave(self, what: str, error: BaseException) -> None:
        """Have every other process end, for this one will not do its part of ``what``."""
        if self.left is None:
            said = " ".join(str(error).split())
            name = type(error).__name__
            self.left = f"process {self._store.process} left {what}: {name}{': ' if said else ''}{said}"
            self._over.set()
            with contextlib.suppress(Exception):
                self._tell(self.left)

    def until_all_answer(self) -> None:
        """Return when each that gave signs of life has given a new one; if one does not, this one ends."""
        begun = self._answers + 2  # of two readings from now on the second began after this
        self._wait_until(lambda: self._answers >= begun)
        then = {one: beat for one, beat in self._beats.items() if one in self._others}
        self._wait_until(lambda: all(self._beats.get(one) != beat for one, beat in then.items()))

    def _wait_until(self, holds: Callable[[], bool]) -> None:
        while not holds() and not self._over.wait(BEAT):
            pass

    def _live(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            with contextlib.suppress(Exception):  # silence is judged
                self._store.put(f"beats/{self._store.process}", str(count))
                self._beats = self._store.entries("beats")
                self._answers += 1

    def _judge(self) -> None:
        answers, then, silent = 0, {}, dict.fromkeys(self._others, 0)
        while not self._over.wait(BEAT):
            now, answered = self._beats, self._answers != answers
            for one in self._others:
                still = now.get(one) == then.get(one) and now.get(one) not in (None, OVER)
                # Where the service does not answer, it is process 0 that does not.
                waits = still if answered else one == 0
                silent[one] = silent[one] + 1 if waits else silent[one] * (not answered)
                if silent[one] >= SILENT:
                    self._end(f"process {one} has not answered for {SILENT * BEAT:.0f} seconds")
                if now.get(one) == OVER and self._busy:
                    self._end(f"process {one} has ended, and this one is in {self._busy[-1]}")
            answers, then = self._answers, now

    def _listen(self) -> None:
        said = None
        while said is None:
            try:
                said = self._store.wait(f"told/{self._store.process}", DAY)
            except Exception as error:
                if "DEADLINE_EXCEEDED" not in str(error):
                    said = (
                        f"process 0, which has JAX's coordination service, has ended ({_first_line(error)})"
                    )
        if not self._over.is_set():
            self._end(said)

    def _tell(self, said: str) -> None:
        """Have the others hear it. Process 0 waits until they have: the service ends with it."""
        for one in self._others:
            self._store.put(f"told/{one}", said)
        for _ in range(FAREWELL * 10 if self._store.process == 0 else 0):
            if len(self._store.entries("heard")) == len(self._others):
                return
            time.sleep(0.1)

    def _exit(self, said: str) -> None:
        """End this process, wherever its other threads are; the others are told, if they can be."""
        this = self._store.process
        os.write(2, f"torch-dflash: process {this} of {self._store.count} ends: {said}\n".encode())
        farewell = threading.Thread(target=self._farewell, args=(said,), daemon=True)
        farewell.start()
        farewell.join(FAREWELL)
        os._exit(STATUS)

    def _farewell(self, said: str) -> None:
        with contextlib.suppress(Exception):
            self._store.put(f"heard/{self._store.process}", "")
            self._tell(said)

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None and not hasattr(sys, "ps1"):
            self.leave("its program", error)
        if self.left is not None:  # JAX would wait for processes that have ended
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(STATUS)
        self._over.set()
        with contextlib.suppress(Exception):
            self._store.put(f"beats/{self._store.process}", OVER)
            self._store.put(f"told/{self._store.process}", OVER)
        for thread in self._threads:
            thread.join(FAREWELL)


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
