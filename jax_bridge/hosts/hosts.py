"""The processes of a mesh: they compare the facts of every call, and run every step in lockstep."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import cache
from importlib.metadata import version
from typing import Any

import jax

from jax_bridge.hosts import watch
from jax_bridge.hosts.store import Store
from jax_bridge.mesh.shape import devices_of, parts_of
from torch_dflash._version import __version__

PACKAGES = ("jax", "jaxlib", "torch", "torchax", "transformers")
VERSIONS = ", ".join([f"torch_dflash {__version__}", *(f"{one} {version(one)}" for one in PACKAGES)])


class Hosts:
    """This process among the processes of a mesh (`torch_dflash.engine.bridge.Hosts`).

    Calls are numbered. Every process makes the same calls, in the same order, from one thread.
    """

    def __init__(self, store: Store, watcher: watch.Watch):
        self._store, self._watch = store, watcher
        self._calls = self._streams = 0
        self._thread = threading.get_ident()

    @property
    def first(self) -> bool:
        """Whether this is process 0, whose arguments count."""
        return self._store.process == 0

    def order(self, mesh: Any) -> str:
        """The devices of ``mesh`` in their order, which has to be the same in every process."""
        return str([device.id for device in devices_of(mesh) or ()])

    def agree(self, what: str, facts: dict[str, str], given: bytes | None = None) -> bytes:
        """Wait for all processes in the call ``what``, and return the bytes ``given`` in process 0.

        Args:
            what: the call, in words.
            facts: values by name, which have to be the same in all processes.
            given: bytes for all processes; only those of process 0 count.

        Raises:
            RuntimeError: raised in all processes if their facts differ; raised if one process did not come
                in time, and then all end.
        """
        self._check()
        store, call = self._store, self._calls
        self._calls += 1
        own = json.dumps({"the call": what, "what is installed": VERSIONS} | facts)
        with self._part(what):
            pieces = store.put_bytes(f"given/{call}", given or b"") if self.first else 0
            store.put(f"calls/{call}/{store.process}", json.dumps([own, pieces]))
            try:
                store.barrier(f"calls/{call}", watch.LATE)
            except Exception as error:
                raise self._late(what, call) from error
            found = {one: json.loads(text) for one, text in store.entries(f"calls/{call}").items()}
            value = b"" if self.first else store.wait_bytes(f"given/{call}", found[0][1], watch.LATE)
            if self.first and call:  # all have read the last call's values, for all are in this call
                store.drop(f"calls/{call - 1}")
                store.drop(f"given/{call - 1}")
        _compare({one: json.loads(fields) for one, (fields, _) in found.items()})
        return given or b"" if self.first else value

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """While open, this process takes part in ``what``: if the process fails, all others end."""
        self._check()
        with self._part(what):
            self.step()
            yield

    def leave(self, what: str, error: BaseException) -> None:
        """End the other processes, for this process will not do its part of ``what``."""
        self._watch.leave(what, error)

    def paused(self, what: str) -> AbstractContextManager[None]:
        """While open, a user's code runs in ``what``: this process does not end if another one does."""
        return self._watch.paused(what)

    def step(self) -> None:
        """Begin a step that every process has to begin: `watch.Watch` ends this one if another does not."""
        self._watch.step()

    def lead(self) -> Lead:
        """The `Lead` of a new stream."""
        self._streams += 1
        return Lead(self._store, f"streams/{self._streams}", self._watch.is_over)

    @contextmanager
    def _part(self, what: str) -> Iterator[None]:
        """While open, an error of this process ends all other processes."""
        with self._watch.busy(what):
            try:
                yield
            except BaseException as error:
                try:
                    if isinstance(error, jax.errors.JaxRuntimeError):
                        self._watch.until_all_answer()  # the end of another process may have caused the error
                finally:
                    self.leave(what, error)
                raise

    def _check(self) -> None:
        if self._watch.left is not None:
            raise RuntimeError(f"{self._watch.left}; all processes have to be started anew.")
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "this mesh has several processes, which make the same calls in the same order: call its "
                "engines from the thread that made the first one."
            )

    def _late(self, what: str, call: int) -> RuntimeError:
        self._watch.until_all_answer()
        came = self._store.entries(f"calls/{call}")
        absent = ", ".join(str(one) for one in range(self._store.count) if one not in came)
        return RuntimeError(
            f"process {absent} did not come to {what} within {watch.LATE} seconds: every process has to make "
            "the same calls, in the same order."
        )


class Lead:
    """Decides where a stream ends: all stop where process 0 stops, or where Python ends (``over``)."""

    def __init__(self, store: Store, name: str, over: Callable[[], bool]):
        self._store, self._name, self._over, self._chunk = store, name, over, 0

    def go(self) -> bool:
        """Whether there is a next chunk; the call of process 0 decides that there is."""
        return self._decide("go") == "go"

    def stop(self) -> bool:
        """Leave the stream; returns whether process 0 leaves it, too."""
        return self._over() or self._decide("stop") == "stop"

    def _decide(self, own: str) -> str:
        chunk, self._chunk = self._chunk, self._chunk + 1
        if self._store.process:
            try:
                return self._store.wait(f"{self._name}/{chunk}", watch.LATE)
            except Exception as error:
                raise RuntimeError(
                    f"process 0 did not go on with a stream within {watch.LATE} seconds, nor left it."
                ) from error
        self._store.put(f"{self._name}/{chunk}", own)
        if chunk > 1:  # all have run the last chunk, so they have read the decisions before it
            self._store.drop(f"{self._name}/{chunk - 2}")
        return own


def _compare(facts: dict[int, dict[str, str]]) -> None:
    """Raise ``RuntimeError`` unless the facts of all processes are equal."""
    first = facts[0]
    for one, fields in sorted(facts.items()):
        for name in dict.fromkeys([*first, *fields]):
            if first.get(name) != fields.get(name):
                raise RuntimeError(
                    f"process {one} is not where process 0 is: {name} is {_short(fields.get(name))} there, "
                    f"{_short(first.get(name))} in process 0. Every process has to make the same calls, in "
                    "the same order, of the same models."
                )


def _short(text: str | None) -> str:
    return "not said" if text is None else text if len(text) < 400 else f"{text[:397]}..."


def spanning(mesh: Any, replicas: int = 1) -> Hosts | None:
    """The processes of ``mesh``, as in `torch_dflash.compile`; None: all its devices are this process's own.

    Raises:
        TypeError, ValueError: ``mesh`` is no mesh, has devices of some processes alone, or cannot be shared
            by ``replicas``; or the processes have not joined.
    """
    found = sorted({device.process_index for part in parts_of(mesh, replicas) for device in part})
    this, count = jax.process_index(), jax.process_count()
    if found == [this]:
        return None
    if found != list(range(count)):
        raise ValueError(
            f"mesh: its devices are those of processes {found} of {count}, and this is process {this}; pass "
            "devices of every process, or of this process alone."
        )
    return _joined()


@cache
def _joined() -> Hosts:
    store = Store.joined()
    if store is None:
        raise ValueError(
            f"mesh: JAX has devices of {jax.process_count()} processes, which have not joined: call "
            "jax.distributed.initialize() first, in each of them."
        )
    watcher = watch.Watch(store)
    watcher.start()
    return Hosts(store, watcher)
