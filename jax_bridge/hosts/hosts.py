"""The processes of a mesh: they agree on every call, and do each step together."""

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
    """This process among those of a mesh (`torch_dflash.engine.hosts.Hosts`).

    Its calls are numbered. All processes make the same ones, in the same order, from one thread.
    """

    def __init__(self, store: Store, seen: watch.Watch):
        self._store, self._watch = store, seen
        self._calls = self._streams = 0
        self._thread = threading.get_ident()

    @property
    def first(self) -> bool:
        """Whether what this process is given counts."""
        return self._store.process == 0

    def order(self, mesh: Any) -> str:
        """The devices of ``mesh`` in their order; other processes have to name them in the same."""
        return str([device.id for device in devices_of(mesh) or ()])

    def agree(self, what: str, facts: dict[str, str], given: bytes | None = None) -> bytes:
        """Meet the others in the call ``what``, and return what process 0 was ``given``.

        Args:
            facts: what has to be the same in all processes, by name.
            given: of process 0 alone.

        Raises:
            RuntimeError: the processes differ, in all of them; or one of them did not come in time, and all
                end.
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
            if self.first and call:  # all have read it: they are in the next one
                store.drop(f"calls/{call - 1}")
                store.drop(f"given/{call - 1}")
        _compare({one: json.loads(fields) for one, (fields, _) in found.items()})
        return given or b"" if self.first else value

    @contextmanager
    def collective(self, what: str) -> Iterator[None]:
        """While open, this process takes part in ``what``: if it fails, all others end."""
        self._check()
        with self._part(what):
            self.step()
            yield

    def leave(self, what: str, error: BaseException) -> None:
        """Have the others end, for this process will not do its part of ``what``."""
        self._watch.leave(what, error)

    def paused(self, what: str) -> AbstractContextManager[None]:
        """While open, a user's code has the turn in ``what``: a process that ends is not missed."""
        return self._watch.paused(what)

    def step(self) -> None:
        """Begin what all have to take part in: one that does not is missed."""
        self._watch.step()

    def lead(self) -> Lead:
        """Of a stream: process 0 decides how far it goes."""
        self._streams += 1
        return Lead(self._store, f"streams/{self._streams}", self._watch.is_over)

    @contextmanager
    def _part(self, what: str) -> Iterator[None]:
        """While open, an error of this process ends all others."""
        with self._watch.busy(what):
            try:
                yield
            except BaseException as error:
                try:
                    if isinstance(error, jax.errors.JaxRuntimeError):
                        self._watch.until_all_answer()  # it may be another's end that has failed here
                finally:
                    self.leave(what, error)
                raise

    def _check(self) -> None:
        if self._watch.left is not None:
            raise RuntimeError(f"{self._watch.left}; all processes have to be started anew.")
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "this mesh is of several processes, which do the same in the same order: call its engines "
                "from the thread that made the first one."
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
    """How far a stream goes: what process 0 does, all do. Once ``over`` says that Python ends, each stops."""

    def __init__(self, store: Store, name: str, over: Callable[[], bool]):
        self._store, self._name, self._over, self._chunk = store, name, over, 0

    def go(self) -> bool:
        """Whether there is a next chunk; process 0 says so by asking."""
        return self._decide("go") == "go"

    def stop(self) -> bool:
        """Leave the stream; whether process 0 does, too."""
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
        if chunk > 1:  # the last one ran in all processes, which have read what is older
            self._store.drop(f"{self._name}/{chunk - 2}")
        return own


def _compare(facts: dict[int, dict[str, str]]) -> None:
    """Raise ``RuntimeError`` unless all processes have said the same."""
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
    """The processes of ``mesh``, as in `torch_dflash.compile`; None: its devices are this one's own.

    Raises:
        TypeError, ValueError: it is no mesh, or of some processes alone, or they have not joined, or
            ``replicas`` cannot share it.
    """
    found = sorted({device.process_index for part in parts_of(mesh, replicas) for device in part})
    this, count = jax.process_index(), jax.process_count()
    if found == [this]:
        return None
    if found != list(range(count)):
        raise ValueError(
            f"mesh: its devices are those of processes {found} of {count}, and this is process {this}; pass "
            "devices of every process, or of this one alone."
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
    seen = watch.Watch(store)
    seen.start()
    return Hosts(store, seen)
