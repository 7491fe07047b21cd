"""`Slots`: requests on the rows of an engine, admitted as rows come free and decoded beside each other."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from queue import Empty, SimpleQueue
from typing import Any, NamedTuple

import numpy as np
import torch

from torch_dflash.engine.outputs import Deltas, GenerateOutput, collect
from torch_dflash.engine.scheduler import Scheduler
from torch_dflash.engine.width import Pace
from torch_dflash.guards.reentry import entering
from torch_dflash.record import WHOLE
from torch_dflash.requests.prompts import prompt_chunks
from torch_dflash.requests.read import impure
from torch_dflash.requests.request import Request, Row, row_requests
from torch_dflash.rows import RowRequests
from torch_dflash.runtime import HostRead, Progress, Rounds, RowDelta, Runtime
from torch_dflash.state import PromptChunk


class QueueFull(RuntimeError):
    """More requests wait than the queue of `Slots` holds."""


class Version(NamedTuple):
    """The models when a request came: the engine's `Built`, and each replica's weights."""

    built: Any
    params: list[Any]

    def same(self, other: Version | None, replica: int) -> bool:
        """Whether rows of both may decode together on ``replica``."""
        if other is None or self.built is not other.built:
            return False
        own, others = self.params[replica], other.params[replica]
        return own is others or own.keys() == others.keys() and all(own[name] is others[name] for name in own)


@dataclass
class Service:
    """The work of a replica for one request.

    Attributes:
        replica: its number. admitted: when (`time.perf_counter`).
        progress: the row's, a batch of one. prefilled: tokens of its prompt that were read.
        read_at: when each of the row's reads ended.
        first_round, compiled: the replica's count of rounds and all compiled XLA programs at the admission.
    """

    replica: int
    admitted: float
    progress: Progress
    first_round: int
    compiled: int
    read_at: list[float] = field(default_factory=list)
    prefilled: int = 0


class Handle(Future):
    """A request on its way: iterate its `RowDelta`s, wait for its `result`, or `cancel` it.

    A `concurrent.futures.Future` of a `GenerateOutput` with one row, whose times count from the admission.
    Without threads of its own the loop runs while somebody waits for a result or iterates.

    Attributes:
        request: of one row.
        service: the work for it; None before its admission.
        submitted: when (`time.perf_counter`).
    """

    def __init__(
        self,
        request: Request,
        version: Version,
        slots: Slots,
        listen: Callable[[RowDelta | None], None] | None = None,
    ):
        super().__init__()
        self.request, self._slots = request, slots
        self.version: Version | None = version
        self.service: Service | None = None
        self.submitted = time.perf_counter()
        self.left = False
        self._deltas: SimpleQueue[RowDelta | None] = SimpleQueue()
        self._listen = listen or self._deltas.put
        self._collects = listen is None

    @property
    def row(self) -> Row:
        """The request's only row."""
        return self.request.rows[0]

    def cancel(self) -> bool:
        """Give the request up; its row is free after the chunk under way. False: it has ended."""
        self.left = True  # no lock: this may run in the garbage collection of any thread
        return not self.done()

    def __iter__(self) -> Iterator[RowDelta]:
        """Yield new tokens, read by read, to the end.

        Raises:
            Exception: what ended the request.
        """
        while (delta := self._slots.next_of(self._deltas)) is not None:
            yield delta
        self._deltas.put(None)  # for whoever iterates once more
        if not self.cancelled():
            super().result()

    def result(self, timeout: float | None = None) -> GenerateOutput:
        """The output, when the request has ended.

        Raises:
            CancelledError: it was cancelled. TimeoutError: it runs on. Exception: what ended it.
        """
        self._slots.drive(self, timeout)
        return super().result(timeout)

    def report(self, delta: RowDelta | None) -> None:
        """Hand on what the row has gained; None: nothing more comes."""
        self._listen(delta)

    def end(self, error: BaseException | None = None) -> None:
        """Set the result, or ``error``; a request that was given up is cancelled."""
        if self.left:
            super().cancel()
        if self.set_running_or_notify_cancel():
            try:
                output = self._output() if error is None else None
            except Exception as found:
                error, output = found, None
            self.set_exception(error) if error is not None else self.set_result(output)
        self.version = None  # its weights may be old ones
        with suppress(Exception):  # of a listener, which has ended its request already
            self._listen(None)

    def _output(self) -> GenerateOutput | None:
        if not self._collects or (service := self.service) is None:
            return None
        times = [at - service.admitted for at in service.read_at]
        compiled = self._slots.compilations - service.compiled
        return collect(self.request, service.progress, times, compiled, service.prefilled)


class Slot:
    """A row of the state and the request that has it."""

    def __init__(self, handle: Handle, service: Service, largest_chunk: int, slots: int):
        row = handle.row
        self.handle, self.service, self.progress = handle, service, service.progress
        self.progress.tokens[0, : row.length] = row.prompt  # a stop string may begin there
        self.pieces = deque(prompt_chunks([row.prompt], 1, largest_chunk, slots))
        self._deltas = Deltas([row.length])

    def take_in(self, read: HostRead, ended: bool, width: int) -> list[int]:
        """Add a read; ask stop rules, grammar and listeners. Return each new round's tokens."""
        progress, row = self.progress, self.handle.row
        since, rounds = int(progress.known[0]), progress.rounds.copy()
        progress.add(read)
        progress.ended[0] = ended
        accepted = progress.accepted_since(rounds)[0]
        progress.widths[width] += len(accepted)
        text = progress.tokens[0, : progress.known[0]]
        found = [rule.ends([text], [since], progress.record)[0] for rule in row.stopping]
        ends = [end for end in found if end is not None and progress.known[0] > row.length]
        if ends:  # the device may have run past the end; the surplus is cut
            progress.cut(0, min(ends))
        if row.grammar is not None:  # once more, against the tokens themselves
            row.grammar.check(progress.tokens[0, row.length : progress.known[0]].tolist())
        self.handle.report(self._deltas.by(progress)[0])
        return accepted


class Lane:
    """The rows of one replica and the loop that fills them. One thread at a time steps it.

    Args:
        replica: its number. slots: whose requests it takes.
    """

    def __init__(self, replica: int, slots: Slots):
        self.replica, self._all = replica, slots
        self.plan, self._largest = slots.plan, slots.largest_chunk
        self._single = replace(self.plan, batch_size=1)
        self.inbox: deque[Handle] = deque()
        self.rows: dict[int, Slot] = {}
        self.busy = self.taken = self.rounds = self.compiled = 0
        self.thread: threading.Thread | None = None
        self._state: Any = None
        self._version: Version | None = None
        self._rest()

    @property
    def idle(self) -> bool:
        """Whether no request is left."""
        return not self.rows and not self.inbox

    def step(self) -> None:
        """One chunk: rows that were given up leave, requests are admitted, prompts and rounds run, one read.

        An error of the device ends every request that has a row; those that wait begin anew.
        """
        for row in [row for row, slot in self.rows.items() if slot.handle.left]:
            self._leave(row)
        version = self._version
        if not self.rows:  # the models may be others since
            version = next((handle.version for handle in self.inbox if not handle.left), None)
        if version is None or not (self.rows or self.inbox):
            self._drop_left()
        else:
            self._guarded(version)
        if not self.rows:
            self._rest()

    def _guarded(self, version: Version) -> None:
        version.built.pair.check_free()
        try:
            with entering(version.built.pair):
                found = self._chunk(version)
            if found is not None:  # whoever hears of it may submit more
                self._take_in(version, *found)
        except BaseException as error:
            self._state = None  # a step that failed may have consumed it
            for row in list(self.rows):
                self._leave(row, error)
            self._rest()
            if not isinstance(error, Exception):
                raise

    def _rest(self) -> None:
        """Hold no state and no weights."""
        if self._state is not None and self._version is not None:
            self._version.built.runtimes[self.replica].retire(self._state)
        self._state, self._version = None, None
        self._scheduler, self._pace = Scheduler.idle(self.plan), Pace()
        self._latest: dict[int, Row] = {}  # a row's grammar is asked until the row begins anew

    def _chunk(self, version: Version) -> tuple | None:
        """Run the device's part of a step. Return the arguments of `_take_in`; None: no row was live."""
        runtime, params = version.built.runtimes[self.replica], version.params[self.replica]
        compiled = runtime.compilations
        going = self._scheduler.going()
        new = self._admitted(version)
        if not self.rows:
            return None
        self._version = version
        together = self._begin(runtime, params, new)
        prompts = self._prompts(new) if together else []
        fed = [] if together else self._pieces([*going, *new])
        live = [row for row in [*going, *new] if not self.rows[row].pieces]
        table, done = self._scheduler.changes(live, anew=bool(new))
        if done is not None:  # before the prompts: their programs make rows live
            self._state = runtime.assign(self._state, table, done)
        known, rounds = self._known("known"), self._known("rounds")
        if {*WHOLE.values()} & {*self.plan.outputs}:
            self._state = runtime.record_from(self._state, known)
        for chunk in prompts:
            self._state = runtime.prefill(params, self._state, chunk)
        for row, chunk in fed:
            self._state = runtime.feed(params, self._state, row, chunk)
        if not live:
            return None
        turn, started = version.built.widths.next(self._pace), time.perf_counter()
        self._state = runtime.advance(params, self._state, turn, self._wanted(live))
        read, now = runtime.read(self._state, known, rounds), time.perf_counter()
        compiled = runtime.compilations - compiled
        self.compiled += compiled
        self._scheduler.update(read.length, read.done)
        alone = not (prompts or fed or compiled)
        return live, read, turn, now, now - started if alone else None

    def _take_in(
        self,
        version: Version,
        live: list[int],
        read: HostRead,
        turn: Rounds,
        now: float,
        seconds: float | None,
    ) -> None:
        """Hand each row its read; rows that have ended leave."""
        accepted = [self._hand_on(row, read.row(row), turn.width, now) for row in live]
        self.rounds += max(map(len, accepted), default=0)
        version.built.widths.note(turn, seconds, accepted, self._pace)

    def _begin(self, runtime: Runtime, params: Any, new: list[int]) -> bool:
        """Begin the requests of rows ``new``. Return whether their prompts are to be read together."""
        fresh = self._state is None
        together = fresh and len(new) == len(self.rows) and 2 * len(new) > self.plan.batch_size
        rows = {row: self.rows[row].handle.row for row in new}
        self._latest |= rows
        if fresh:
            idle = RowRequests.idle(self.plan)
            requests = row_requests([*rows.values()], self.plan) if together else idle
            self._state = runtime.begin(params, requests, stale=True)
        for row, request in {}.items() if together else rows.items():
            requests = row_requests([request], self._single)
            self._state = runtime.admit(params, self._state, row, requests)
        return together

    def _wanted(self, live: list[int]) -> np.ndarray | None:
        """Rows [B] whose end is the chunk's, while a request waits."""
        if not self._all.waiting:
            return None
        wanted = np.zeros(self.plan.batch_size, bool)
        wanted[live] = True
        return wanted

    def _admitted(self, version: Version) -> list[int]:
        """Give free rows to requests, in the order of their arrival, while there are pages."""
        new: list[int] = []
        while len(self.rows) < self.plan.batch_size and self._all.deal(self):
            handle = self.inbox[0]
            if handle.left:
                self._drop_left()
                continue
            if not version.same(handle.version, self.replica):
                break  # it waits until the rows under way have ended, with the weights they began with
            row = next(row for row in range(self.plan.batch_size) if row not in self.rows)
            if not self._scheduler.seat(row, handle.row.length, handle.row.limit):
                break
            self.inbox.popleft()
            now = time.perf_counter()
            progress = Progress.empty(self._single, np.array([handle.row.length]))
            handle.service = Service(self.replica, now, progress, self.rounds, self._all.compilations)
            self.rows[row] = Slot(handle, handle.service, self._largest, self.plan.slots)
            new.append(row)
        return new

    def _prompts(self, rows: list[int]) -> list[PromptChunk]:
        """The prompts of rows that begin together, for the whole batch's program."""
        for row in rows:
            self.rows[row].pieces.clear()
            self.rows[row].service.prefilled = self.rows[row].handle.row.length
        prompts = [self.rows[row].handle.row.prompt for row in rows]
        return list(prompt_chunks(prompts, self.plan.batch_size, self._largest, self.plan.slots))

    def _pieces(self, rows: list[int]) -> list[tuple[int, PromptChunk]]:
        """The next piece of each prompt, together no longer than the largest one, but at least one piece."""
        found, left = [], self._largest
        for row in rows:
            slot = self.rows[row]
            if slot.pieces and (not found or slot.pieces[0].ids.shape[1] <= left):
                chunk = slot.pieces.popleft()
                left -= chunk.ids.shape[1]
                slot.service.prefilled += int(chunk.count[0])
                found.append((row, chunk))
        return found

    def _known(self, name: str) -> np.ndarray:
        """A count [B] of the host's for each row, 0 where there is no request."""
        counts = np.zeros(self.plan.batch_size, np.int32)
        for row, slot in self.rows.items():
            counts[row] = getattr(slot.progress, name)[0]
        return counts

    def _hand_on(self, row: int, read: HostRead, width: int, now: float) -> list[int]:
        """Hand a row its read; an exception of its host code ends its request alone."""
        slot, accepted = self.rows[row], []
        slot.service.read_at.append(now)
        try:
            accepted = slot.take_in(read, bool(self._scheduler.ended[row]), width)
        except Exception as error:
            self._leave(row, error)
        else:
            if slot.progress.ended[0]:
                self._leave(row)
        return accepted

    def _leave(self, row: int, error: BaseException | None = None) -> None:
        """Free a row, then report: whoever hears that a request is over finds the row free."""
        slot = self.rows.pop(row)
        self._scheduler.ended[row] = True
        self._all.freed(self)
        slot.handle.end(error)

    def _drop_left(self) -> None:
        """Forget requests that were given up before their admission."""
        while self.inbox and self.inbox[0].left:
            handle = self.inbox.popleft()
            self._all.freed(self)
            handle.end()


class Slots:
    """Rows of an engine as slots: submit requests at any time, each decodes as if it were alone.

    A row's text does not depend on its neighbours or its place. Requests are admitted in the order of their
    arrival, while a row and pages are free. No request is ever thrown out again: a row gets pages only if
    all rows can still be finished (`torch_dflash.engine.pages`), so there is nothing to preempt.

    Args:
        engine: its rows, and those of its replicas.
        queue: most requests that may wait; None: any number.
        threads: whether a thread of its own steps each replica while there is work; otherwise whoever waits
            for a result does, or `step`.
    """

    def __init__(self, engine: Any, queue: int | None = None, threads: bool = False):
        self._engine, self._queue = engine, queue
        self.plan, self.largest_chunk = engine.plan, engine.options.prefill_chunk_size
        if names := impure(self.plan.processors):
            raise ValueError(
                f"{names[0]} has to be asked once for each token of one call, rows of many calls cannot; "
                " pass td.HostProcessor(..., pure=True) if its scores follow from its arguments."
            )
        self._line: deque[Handle] = deque()
        self._lock, self._stepping, self._threads = threading.RLock(), threading.Lock(), threads
        self._checked = -CHECK_SECONDS
        self._lanes = [Lane(replica, self) for replica in range(engine.options.replicas)]

    @property
    def waiting(self) -> int:
        """Requests that have no row yet."""
        line = list(self._line)
        return sum(not handle.left for handle in line) + sum(len(lane.inbox) for lane in self._lanes)

    @property
    def running(self) -> int:
        """Requests that have a row."""
        return sum(len(lane.rows) for lane in self._lanes)

    def submit(
        self, input_ids: Any, attention_mask: Any = None, *, check: bool | None = None, **options: Any
    ) -> Handle:
        """Queue a request of one row; arguments as of `Engine.generate`.

        Args:
            check: whether to look for changes of the models' code and modules before; None: if nothing runs,
                and at most once a second.

        Raises:
            QueueFull: more wait than the queue holds. TypeError, ValueError: what no row can serve.
        """
        (handle,) = self.enqueue([self.read(input_ids, attention_mask, check, options)])
        return handle

    def read(
        self, input_ids: Any, attention_mask: Any, check: bool | None, options: Mapping[str, Any]
    ) -> Request:
        """A request for `enqueue`; arguments and errors as of `submit`."""
        if self._threads and any(map(torch.is_autocast_enabled, ("cpu", "cuda"))):
            raise ValueError(
                "submit under torch.autocast, which the thread that decodes does not see; cast the models "
                "instead (model.to(torch.bfloat16))."
            )
        due = time.monotonic() - self._checked > CHECK_SECONDS or not self.running
        if due if check is None else check:
            self._engine.follow()
            self._checked = time.monotonic()
        requested = {**options, "return_dict_in_generate": True}
        request = self._engine.read_rows(input_ids, attention_mask, self._engine.split(requested))
        if len(request.rows) > 1:
            raise ValueError(f"input_ids has {len(request.rows)} rows: submit takes one; submit each.")
        # A value that no tensor holds is an error here: in the loop it would be its neighbours', too.
        row_requests([*request.rows], replace(self.plan, batch_size=1))
        return request

    def enqueue(
        self,
        requests: Sequence[Request],
        version: Version | None = None,
        listen: Callable[[int, RowDelta | None], None] | None = None,
    ) -> list[Handle]:
        """Queue requests of one row each, all or none; ``listen`` gets their numbers and deltas.

        ``version``: of the models; None: as they are now.
        """
        handles, models = [], version or self._engine.version()
        for number, request in enumerate(requests):
            own = None if listen is None else partial(listen, number)
            handles.append(Handle(request, models, self, own))
        with self._lock:
            if self._queue is not None and self.waiting + len(handles) > self._queue:
                raise QueueFull(f"{self.waiting} requests wait, queue={self._queue}; submit again later.")
            self._line += handles
            left = self._deal()
        _end(left)
        return handles

    @property
    def compilations(self) -> int:
        """XLA programs that steps have compiled so far."""
        return sum(lane.compiled for lane in self._lanes)

    @property
    def replicas(self) -> int:
        """Engines that share the requests."""
        return len(self._lanes)

    def settle(self, handles: list[Handle]) -> None:
        """Wait until all ``handles``, which have ended or were given up, have left their rows."""
        for handle in handles:
            self.drive(handle)
        wait(handles)

    def step(self) -> bool:
        """Run one chunk of each replica. Return whether requests are left.

        Raises:
            RuntimeError: the slots have threads, which step them.
        """
        if self._threads:
            raise RuntimeError(
                "step: threads decode these slots' requests; wait for a handle's result() instead."
            )
        with self._stepping:
            for lane in self._lanes:
                lane.step()
        return any(not lane.idle for lane in self._lanes)

    def drive(self, handle: Handle, timeout: float | None = None) -> None:
        """Step until ``handle`` has ended, unless threads do."""
        until = None if timeout is None else time.monotonic() + timeout
        while not (self._threads or handle.done() or until is not None and time.monotonic() > until):
            self.step()

    def next_of(self, queue: SimpleQueue) -> Any:
        """The next entry of ``queue``, which the deltas of requests fill."""
        while True:
            try:
                return queue.get(block=self._threads)
            except Empty:
                self.step()

    def deal(self, lane: Lane) -> bool:
        """Give ``lane`` the next request, if there is one. Returns whether its inbox has one."""
        with self._lock:
            left = self._deal()
        _end(left)
        return bool(lane.inbox)

    def freed(self, lane: Lane) -> None:
        """A row of ``lane`` is free."""
        with self._lock:
            lane.busy -= 1
            left = self._deal()
        _end(left)

    def least_busy(self) -> int:
        """The replica for a state that is decoded elsewhere."""
        with self._lock:
            lane = self._next()
            lane.taken += 1
            return lane.replica

    def _next(self) -> Lane:
        """The replica with the fewest rows now, then with the fewest so far."""
        return min(self._lanes, key=lambda lane: (lane.busy, lane.taken, lane.replica))

    def _deal(self) -> list[tuple[Handle, BaseException | None]]:
        """Give requests to replicas. Return those to end without the lock: callbacks may submit more."""
        ended: list[tuple[Handle, BaseException | None]] = [(one, None) for one in self._line if one.left]
        self._line = deque(one for one in self._line if not one.left)
        while self._line:
            lane = self._next()
            if lane.busy >= self.plan.batch_size:
                break
            lane.inbox.append(self._line.popleft())
            lane.busy += 1
            lane.taken += 1
        if self._threads:
            for lane in self._lanes:
                ended += self._wake(lane)
        return ended

    def _wake(self, lane: Lane) -> list[tuple[Handle, BaseException | None]]:
        if lane.thread is not None or lane.idle:
            return []
        lane.thread = threading.Thread(target=self._serve, args=(lane,), name=f"replica {lane.replica}")
        try:
            lane.thread.start()
        except RuntimeError as error:  # the process may have no more threads
            lane.thread, waiting = None, [*lane.inbox]
            lane.busy -= len(waiting)
            lane.inbox.clear()
            return [(handle, error) for handle in waiting]
        return []

    def _serve(self, lane: Lane) -> None:
        try:
            while True:
                with self._lock:
                    if lane.idle:
                        lane.thread = None
                        return
                lane.step()
        except BaseException:
            with self._lock:
                lane.thread = None
                left = self._deal()  # another thread takes those that wait
            _end(left)
            raise


def _end(handles: list[tuple[Handle, BaseException | None]]) -> None:
    for handle, error in handles:
        handle.end(error)


CHECK_SECONDS = 1.0
"""Seconds between two looks at the models of requests that come while others run."""
