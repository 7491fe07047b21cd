"""`Replicas`: copies of an engine on parts of a mesh; rows go to the least busy copy."""

from __future__ import annotations

import threading
import time
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_dflash.engine.bridge import hosts_of
from torch_dflash.engine.call import Call, Part
from torch_dflash.engine.desk import Desk, Group
from torch_dflash.engine.engine import Built, Engine
from torch_dflash.engine.hosts import HostsEngine
from torch_dflash.engine.outputs import Deltas, GenerateOutput, Share, collect
from torch_dflash.engine.session import Session
from torch_dflash.progress import lasting
from torch_dflash.requests.options import EngineOptions
from torch_dflash.requests.read import check_each_fits
from torch_dflash.requests.request import Request
from torch_dflash.runtime import RowDelta
from torch_dflash.state import DecodeState
from torch_dflash.targets.weights import mesh_of


class Replicas(Engine):
    """An `Engine` whose rows several decode, each on its part of the mesh with its own weights and states.

    A call may have any number of rows. They go to the replica with fewest, ``batch_size`` of them at most;
    more wait until a replica has room. Each replica decodes in a thread of its own, and what a row says does
    not depend on where it is: rows come back in the order in which they were asked for. Made by
    `torch_dflash.compile`.

    Attributes:
        engines: of each replica; sessions and states that are handed out are of one of them.
    """

    def __init__(self, target: Any, drafter: Any, options: EngineOptions):
        super().__init__(target, drafter, options)
        self._desk = Desk(len(self.engines), self.plan.batch_size)

    def _take(self, built: Built) -> None:
        super()._take(built)
        self.engines = [_engine_on(self, replace(built, runtimes=[runtime])) for runtime in built.runtimes]

    def warmup(self, progress: bool | None = None) -> Replicas:
        """As `Engine.warmup`, for all replicas: XLA compiles for each device anew, all but the first at once.

        With ``verify_width="auto"`` the first one's rounds show what a width costs.
        """
        self.follow()
        first, *others = self.engines
        first.warmup(progress)
        if others:
            with (
                ThreadPoolExecutor(len(others)) as pool,
                lasting(progress, "compiling for the other replicas", len(others), "replica") as bar,
            ):
                for _ in pool.map(lambda engine: engine.warmup(progress=False), others):
                    bar.update()
        return self

    def run(self, request: Request, streamer=None) -> GenerateOutput:
        """Decode a request that was read; an error of one replica ends it, when the others have stopped."""
        started = time.perf_counter()
        self._check(request)
        call = self._call(request)
        if streamer is not None:
            streamer.put(request.input_ids.cpu())
        try:
            self._begin_all(self._desk.queue(call))
            for gains in call.gains():
                if streamer is not None and gains[0].tokens:
                    streamer.put(torch.tensor(gains[0].tokens))
        finally:
            self._desk.close(call)
            call.rest()
        if streamer is not None:
            streamer.end()
        return _collect(call, started, len(self.engines))

    def gains(self, request: Request) -> Generator[list[RowDelta], None, None]:
        """Yield each row's new tokens, one read of one replica at a time; other rows gain nothing then.

        Replicas go on while the caller does something else. Left early, they stop after their chunk.
        """
        call, over = self._call(request), [False] * len(request.rows)
        kept = "output_logprobs" in self.plan.outputs, bool(self.plan.top_logprobs)
        try:
            self._begin_all(self._desk.queue(call))
            for gains in call.gains():
                over = [gains[row].done if row in gains else done for row, done in enumerate(over)]
                yield [gains.get(row) or _nothing(done, *kept) for row, done in enumerate(over)]
        finally:
            call.stopped = True  # no lock, no wait: this may run in the garbage collection of any thread

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

    def _check(self, request: Request) -> None:
        check_each_fits(request, self.plan)

    def _least_busy(self) -> Engine:
        return self.engines[self._desk.least_busy()]

    def _call(self, request: Request) -> Call:
        """All replicas take the weights as they are now: rows that wait are decoded with the same."""
        tensors = self._live()
        return Call(request, [engine.runtime.refresh(tensors) for engine in self.engines])

    def _begin_all(self, groups: Sequence[Group]) -> None:
        for group in groups:
            thread = threading.Thread(target=self._serve, args=(group,), name=f"replica {group.replica}")
            try:
                thread.start()
            except RuntimeError as error:  # the process may have no more threads
                self._end(group, error)

    def _serve(self, group: Group) -> None:
        try:
            part = self._decode(group)
        except BaseException as error:
            self._end(group, error)
        else:
            self._end(group, part)

    def _end(self, group: Group, result: Part | BaseException | None) -> None:
        """Free the group's rows for others, then report: a caller whose call is over finds them free."""
        group.call.stopped |= isinstance(result, BaseException)
        try:
            self._begin_all(self._desk.over(group))
        finally:
            group.call.report(result)

    def _decode(self, group: Group) -> Part | None:
        """Rows to their ends; None: the call was stopped before."""
        replica, call, rows = group
        if call.stopped:
            return None
        engine, own, read_at = self.engines[replica], [call.request.rows[row] for row in rows], []
        compiled, deltas = engine.runtime.compilations, Deltas([row.length for row in own])
        generation = engine._begin(own, call.params[replica])
        for progress in engine._steps(generation):
            if call.stopped:
                return None
            read_at.append(time.perf_counter())
            call.report(dict(zip(rows, deltas.by(progress), strict=True)))
        compiled = engine.runtime.compilations - compiled
        return Part(replica, rows, progress, read_at, compiled, generation.prefilled)


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


def _nothing(done: bool, logprobs: bool, top: bool) -> RowDelta:
    return RowDelta([], [], done, [] if logprobs else None, [] if top else None)


def _collect(call: Call, started: float, replicas: int) -> GenerateOutput:
    """The parts as one output, as if one engine had decoded all rows."""
    read_at = sorted(at - started for part in call.parts for at in part.read_at)
    compiled, prefilled = (
        sum(getattr(part, name) for part in call.parts) for name in ("compilations", "prefilled")
    )
    output = collect(call.request, call.progress(), read_at, compiled, prefilled)
    assert output.stats is not None
    lengths, shares = output.stats.acceptance_lengths, [Share(0, 0)] * replicas
    for part in call.parts:
        rows, rounds = shares[part.replica]
        longest = max(len(lengths[row]) for row in part.rows)
        shares[part.replica] = Share(rows + len(part.rows), rounds + longest)
    output.stats = replace(output.stats, replicas=tuple(shares))
    return output
