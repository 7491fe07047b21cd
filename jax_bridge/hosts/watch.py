"""Ends this process, with a message, when another process ends, fails or stops answering.

A process that waits for another in a program on the devices cannot be woken. JAX itself ends a waiting
process by a signal, with a stack trace, when the other's heartbeats stop: after 100 seconds by default.
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
"""Seconds between two heartbeats."""
SILENT = 60
"""Heartbeats of its own that a process waits for another's: a process that was suspended has not waited."""
LATE = 600
"""Seconds that a process waits for another that is alive and does not do its part."""
STUCK = 3600
"""Seconds after which a process gives up a step that all are in. A whole `warmup` is one step."""
FAREWELL = 5
"""Seconds for which a process tries to announce its error to the others."""
DAY = 24 * 3600
OVER = "over"
STATUS = 1
"""Exit status of a process that another process has ended."""


class Watch:
    """Three threads: one sends heartbeats, one judges those of others, one waits for announcements.

    Args:
        store: keys and values that all processes share.
        end: ends this process, with a message.
    """

    def __init__(self, store: Store, end: Callable[[str], None] | None = None):
        self._store, self._end = store, end or self._exit
        self._others = [one for one in range(store.count) if one != store.process]
        self._over, self._answers = threading.Event(), 0
        self._beats: dict[int, str] = {}
        self._busy: list[str] = []
        self._step = 0
        self.left: str | None = None
        self._announced = False

    def start(self) -> None:
        """Watch until Python ends."""
        kinds = (self._live, self._judge, self._listen)
        self._threads = [threading.Thread(target=kind, daemon=True) for kind in kinds]
        for thread in self._threads:
            thread.start()
        atexit.register(self._at_exit)  # runs before JAX's own, which was registered earlier

    @contextmanager
    def busy(self, what: str) -> Iterator[None]:
        """While open, this process is in ``what``: it ends if another process ends."""
        try:
            self._busy.append(what)
            yield
        finally:
            if what in self._busy:  # Ctrl-C may come before the append
                self._busy.remove(what)

    @contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """While open, this process is not in ``what``."""
        self._busy.remove(what)
        try:
            yield
        finally:
            self._busy.append(what)

    def is_over(self) -> bool:
        """Whether the watch has ended."""
        return self._over.is_set()

    def leave(self, what: str, error: BaseException) -> None:
        """End every other process, for this process will not do its part of ``what``."""
        if self.left is None:
            message = " ".join(str(error).split())
            kind = type(error).__name__
            self.left = f"process {self._store.process} left {what}: {kind}{': ' if message else ''}{message}"
        self._announce_once(self.left)

    def _announce_once(self, left: str) -> None:
        """Announce ``left`` unless that was done: a second Ctrl-C may have stopped the first attempt."""
        self._over.set()
        if not self._announced:
            with contextlib.suppress(Exception):
                self._announce(left)
            self._announced = True

    def until_all_answer(self) -> None:
        """Wait for a new heartbeat of each process that sent one; `_judge` ends a wait in vain."""
        begun = self._answers + 2  # of two reads that end after this line, the later one began after it
        self._wait_until(lambda: self._answers >= begun)
        before = {one: beat for one, beat in self._beats.items() if one in self._others}
        self._wait_until(lambda: all(self._beats.get(one) != beat for one, beat in before.items()))

    def _wait_until(self, condition: Callable[[], bool]) -> None:
        while not condition() and not self._over.wait(BEAT):
            pass

    def step(self) -> None:
        """Count a step that every process has to begin."""
        self._step += 1

    def _live(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            with contextlib.suppress(Exception):  # `_judge` ends this process if no answer comes
                self._store.put(f"beats/{self._store.process}", f"{count} {self._step}")
                self._beats = self._store.entries("beats")
                self._answers += 1

    def _judge(self) -> None:
        answers, before, step, unchanged = 0, {}, 0, 0
        silent, late = dict.fromkeys(self._others, 0), dict.fromkeys(self._others, 0)
        while not self._over.wait(BEAT):
            now, answered = self._beats, self._answers != answers
            for one in self._others:
                beat = now.get(one)
                # Process 0 has the service: no answer of the service is none of process 0.
                waits = beat == before.get(one) and beat not in (None, OVER) if answered else one == 0
                silent[one] = silent[one] + 1 if waits else silent[one] * (not answered)
                late[one] = late[one] + 1 if step == self._step and _is_behind(beat, step) else 0
                self._end_for(one, beat, silent[one], late[one])
            doing = self._busy[-1:]
            unchanged = unchanged + 1 if doing and step == self._step else 0
            if unchanged * BEAT >= STUCK:
                self._end(f"no process has got on with {doing[0]} for {STUCK} seconds; all are in it")
            answers, before, step = self._answers, now, self._step

    def _end_for(self, one: int, beat: str | None, silent: int, late: int) -> None:
        """End this process if process ``one`` missed too many beats, or ended while this one is busy."""
        doing = self._busy[-1:]  # read once: another thread may end or pause the call
        if silent >= SILENT:
            self._end(f"process {one} has not answered for {SILENT * BEAT:.0f} seconds")
        elif doing and beat == OVER:
            self._end(f"process {one} has ended, and this one is in {doing[0]}")
        elif doing and late * BEAT >= LATE:
            self._end(f"process {one} is alive, and did not take part in {doing[0]} within {LATE} seconds")

    def _listen(self) -> None:
        message, lost = None, False
        while message is None:
            try:
                message = self._store.wait(f"told/{self._store.process}", DAY)
            except Exception as error:
                lost = "DEADLINE_EXCEEDED" not in str(error)
                message = (
                    f"process 0, which has JAX's service, has ended ({_first_line(error)})" if lost else None
                )
        if lost and self.left is not None:
            self._end(self.left)  # JAX would end this process without the reason
        if not self._over.is_set():
            self._end(message)

    def _announce(self, message: str) -> None:
        """Send ``message`` to all others. Process 0 waits for their answers: JAX's service ends with it."""
        for one in self._others:
            self._store.put(f"told/{one}", message)
        for _ in range(FAREWELL * 10 if self._store.process == 0 else 0):
            if len(self._store.entries("heard")) == len(self._others):
                return
            time.sleep(0.1)

    def _exit(self, message: str) -> None:
        """End this process at once, after an attempt to announce the end to the others."""
        this = self._store.process
        os.write(2, f"torch-dflash: process {this} of {self._store.count} ends: {message}\n".encode())
        farewell = threading.Thread(target=self._farewell, args=(message,), daemon=True)
        farewell.start()
        farewell.join(FAREWELL)
        os._exit(STATUS)

    def _farewell(self, message: str) -> None:
        with contextlib.suppress(Exception):
            self._announce(message)
            if self._store.process != 0:  # the last call, for process 0 ends after it
                self._store.put(f"heard/{self._store.process}", "")

    def _at_exit(self) -> None:
        error = getattr(sys, "last_value", None)
        if error is not None and not hasattr(sys, "ps1"):
            self.leave("its program", error)
        if self.left is not None:  # JAX would wait for processes that this one has ended
            self._announce_once(self.left)
            for stream in (sys.stdout, sys.stderr):
                stream.flush()
            os._exit(STATUS)
        self._over.set()
        self._threads[0].join(FAREWELL)  # its last heartbeat must not replace OVER
        with contextlib.suppress(Exception):
            self._store.put(f"beats/{self._store.process}", OVER)
            self._store.put(f"told/{self._store.process}", OVER)  # ends this process's own `_listen`
        for thread in self._threads:
            thread.join(FAREWELL)


def _is_behind(beat: str | None, step: int) -> bool:
    """Whether the process of this heartbeat has begun fewer than ``step`` steps."""
    return beat not in (None, OVER) and int(beat.split()[1]) < step


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0]
