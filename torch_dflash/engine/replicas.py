"""`Replicas`: copies of an engine on parts of a mesh; rows go to the least busy copy."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

from torch import Tensor

from torch_dflash.engine.bridge import hosts_of
from torch_dflash.engine.engine import Built, Engine
from torch_dflash.engine.hosts import HostsEngine
from torch_dflash.engine.session import Session
from torch_dflash.engine.slots import Slots
from torch_dflash.progress import lasting
from torch_dflash.requests.options import EngineOptions
from torch_dflash.requests.request import Request
from torch_dflash.state import DecodeState
from torch_dflash.targets.weights import mesh_of


class Replicas(Engine):
    """An `Engine` whose rows several decode, each on its part of the mesh with its own weights and states.

    A call may have any number of rows. They go to the replica with fewest, and a row that ends is given to
    the next request (`torch_dflash.engine.slots`). Each replica decodes in a thread of its own, and what a
    row says does not depend on where it is: rows come back in the order in which they were asked for. Made
    by `torch_dflash.compile`.

    Attributes:
        engines: of each replica; sessions and states that are handed out are of one of them.
    """

    def __init__(self, target: Any, drafter: Any, options: EngineOptions):
        super().__init__(target, drafter, options)
        self._shared = Slots(self, threads=True)

    def _take(self, built: Built) -> None:
        super()._take(built)
        self.engines = [_engine_on(self, replace(built, runtimes=[runtime])) for runtime in built.runtimes]

    def warmup(self, progress: bool | None = None, slots: bool = True) -> Replicas:
        """As `Engine.warmup`, for all replicas: XLA compiles for each device anew, all but the first at once.

        Rows of replicas always are slots.

        With ``verify_width="auto"`` the first one's rounds show what a width costs.
        """
        self.follow()
        first, *others = self.engines
        first.warmup(progress, slots)
        if others:
            with (
                ThreadPoolExecutor(len(others)) as pool,
                lasting(progress, "compiling for the other replicas", len(others), "replica") as bar,
            ):
                for _ in pool.map(lambda engine: engine.warmup(False, slots), others):
                    bar.update()
        return self

    def session(self) -> Session:
        """As `Engine.session`: all its requests are decoded by one replica."""
        self.follow()
        return self._least_busy().session()

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> DecodeState:
        """As `Engine.start`, on one replica: at most ``batch_size`` rows."""
        self.follow()
        return self._least_busy().start(input_ids, attention_mask, **options)

    def advance(self, state: DecodeState) -> DecodeState:
        """As `Engine.advance`, by the replica where ``state`` lies; from elsewhere it moves to one."""
        here = [engine for engine in self.engines if engine.runtime.holds(state)]
        return (here[0] if here else self._least_busy()).advance(state)

    def place(self, state: DecodeState) -> DecodeState:
        """A state of torch tensors on one of the replicas."""
        return self._least_busy().place(state)

    def slots(self, queue: int | None = None) -> Slots:
        """As `Engine.slots`; without ``queue`` those that all calls share."""
        return self._shared if queue is None else super().slots(queue)

    def _own_slots(self) -> Slots:
        return self._shared

    def _slots_for(self, request: Request) -> Slots:
        return self._shared

    def _least_busy(self) -> Engine:
        return self.engines[self._shared.least_busy()]


def engine_of(target: Any, drafter: Any, options: EngineOptions) -> Engine:
    """The engine that the options ask for: of several processes, of replicas, or one."""
    hosts = hosts_of(options.runtime, mesh_of(target, options.mesh, options.replicas), options.replicas)
    if hosts is not None:
        return HostsEngine(target, drafter, options, hosts)
    return (Engine if options.replicas == 1 else Replicas)(target, drafter, options)


def _engine_on(engine: Engine, built: Built) -> Engine:
    """An engine of the same pair and models on another runtime."""
    other = Engine.__new__(Engine)
    vars(other).update(vars(engine) | {"_built": built})
    return other
