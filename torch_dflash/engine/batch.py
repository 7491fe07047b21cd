"""`Generation`: one batch, step by step: prompts, pages, rounds, reads."""

from __future__ import annotations

import time
from collections.abc import Generator
from typing import Any

import numpy as np

from torch_dflash.engine.scheduler import READ, Scheduler
from torch_dflash.engine.width import Pace, Widths
from torch_dflash.plan import DecodePlan
from torch_dflash.record import WHOLE
from torch_dflash.requests.prompts import prompt_chunks
from torch_dflash.requests.read import impure
from torch_dflash.requests.request import Row, row_requests
from torch_dflash.runtime import Progress, Rounds, Runtime
from torch_dflash.state import DecodeState


class Generation:
    """One batch on a runtime, step by step: `generate` and `stream` are loops over it, `start` its beginning.

    Args:
        runtime: where steps run.
        plan: the engine's.
        params: the weights, as the runtime holds them.
        state: on the runtime's side of the border; consumed.
        scheduler: who decodes next, and on which pages.
        rows: those that have a prompt to read; of a state that is gone on with, none.
        kept: of each prompt, the tokens that the state holds already; unset: none.
        stale: whether ``state`` began so, as in `Runtime.begin`.
    """

    def __init__(
        self,
        runtime: Runtime,
        plan: DecodePlan,
        params: Any,
        state: Any,
        scheduler: Scheduler,
        rows: list[Row],
        kept: list[int] | None = None,
        stale: bool = False,
    ):
        self.runtime, self.plan, self.params = runtime, plan, params
        self.state: Any = state
        self.scheduler, self.rows = scheduler, rows
        self._stopping, self._ends = list(dict.fromkeys(rule for row in rows for rule in row.stopping)), {}
        self._kept = [0] * len(rows) if kept is None else kept
        self.pace, self.prefilled, self._stale = Pace(), 0, stale
        self._progress: Progress | None = None

    @classmethod
    def begin(
        cls, runtime: Runtime, plan: DecodePlan, params: Any, rows: list[Row], stale: bool = False
    ) -> Generation:
        """An empty state and every prompt still to be read; ``stale`` as in `Runtime.begin`."""
        state = runtime.begin(params, row_requests(rows, plan), stale)
        return cls(runtime, plan, params, state, Scheduler.for_rows(plan, rows), rows, stale=stale)

    @classmethod
    def resume(cls, runtime: Runtime, plan: DecodePlan, params: Any, state: DecodeState) -> Generation:
        """Resume the generation of ``state``, a paged cache's; its prompts are read."""
        read = runtime.fetch({name: getattr(state, name) for name in READ})
        return cls(runtime, plan, params, state, Scheduler.of(plan, read), [])

    @classmethod
    def go_on(
        cls,
        runtime: Runtime,
        plan: DecodePlan,
        params: Any,
        state: Any,
        rows: list[Row],
        kept: list[int],
        snapshot: Any = None,
    ) -> Generation:
        """``state`` with other prompts, of which it holds ``kept`` tokens; ``snapshot`` as in `rewind`."""
        table = None if plan.cache == "static" else runtime.fetch(state.page_table).numpy()
        counts = np.zeros(plan.batch_size, np.int32)
        counts[: len(kept)] = kept
        state = runtime.rewind(params, state, counts, row_requests(rows, plan), snapshot)
        return cls(runtime, plan, params, state, Scheduler.for_rows(plan, rows, table), rows, kept)

    @property
    def over(self) -> bool:
        """Whether every row has ended."""
        return self.scheduler.over

    def prepare(self, largest_chunk: int) -> bool:
        """Do what the scheduler decides for the next chunk: give pages, read the prompts that are due.

        Returns whether a prompt was read.
        """
        step = self.scheduler.next_step()
        if step.done is not None:
            self.state = self.runtime.assign(self.state, step.page_table, step.done)
        if step.prefill:
            due = [row.prompt[:0] for row in self.rows]
            for row in step.prefill:
                due[row] = self.rows[row].prompt[self._kept[row] :]
            slots_left = self.plan.slots - max(self._kept[row] for row in step.prefill)
            self.prefilled += sum(map(len, due))
            whole = bool(impure(self.plan.processors))
            for chunk in prompt_chunks(due, self.plan.batch_size, largest_chunk, slots_left, whole):
                self.state = self.runtime.prefill(self.params, self.state, chunk)
        return bool(step.prefill)

    def advance(self, turn: Rounds) -> None:
        """One chunk of rounds, without a host read."""
        self.state = self.runtime.advance(self.params, self.state, turn)

    def steps(self, largest_chunk: int, widths: Widths) -> Generator[Progress, None, None]:
        """Every `step`, to the end. A stale state is retired then, or when its reader leaves."""
        try:
            while not self.over:
                yield self.step(largest_chunk, widths)
        except Exception:
            self._stale = False  # what a program that failed was to fill serves nobody
            raise
        finally:
            if self._stale:
                self.runtime.retire(self.state)
                self.state = None

    def step(self, largest_chunk: int, widths: Widths) -> Progress:
        """Prompts, then rounds (the first step reads prompts alone), then the one host read."""
        first = self._progress is None
        if self._progress is None:
            self._progress = Progress.empty(self.plan, self.scheduler.lengths)
            for number, row in enumerate(self.rows):  # a stop string may begin there
                self._progress.tokens[number, : row.length] = row.prompt
        if {*WHOLE.values()} & {*self.plan.outputs}:
            self.state = self.runtime.record_from(self.state, self._progress.known)
        prompts = self.prepare(largest_chunk)
        if first:
            return self._read(self._progress)
        turn, rounds = widths.next(self.pace), self._progress.rounds
        compiled, started = self.runtime.compilations, time.perf_counter()
        self.advance(turn)
        progress = self._read(self._progress)
        alone = not prompts and self.runtime.compilations == compiled
        seconds = time.perf_counter() - started if alone else None
        accepted = progress.accepted_since(rounds)
        progress.widths[turn.width] += max(map(len, accepted))
        widths.note(turn, seconds, accepted, self.pace)
        return progress

    def _read(self, progress: Progress) -> Progress:
        since = progress.known.copy()
        progress.add(self.runtime.read(self.state, progress.known, progress.rounds))
        self.scheduler.update(progress.length, progress.done)
        progress.ended = self.scheduler.ended.copy()
        self._stop_rows(progress, since)
        for number, row in enumerate(self.rows):
            if (grammar := row.grammar) is not None:  # once more, against the tokens themselves
                grammar.check(progress.tokens[number, row.length : progress.known[number]].tolist())
        return progress

    def _stop_rows(self, progress: Progress, since: np.ndarray) -> None:
        """End rows where a stop rule says so. The device may have run past the end; the surplus is cut."""
        rows = range(len(self.rows))
        for row, end in self._ends.items():
            progress.cut(row, end)
        texts = [progress.tokens[row, : progress.known[row]] for row in rows]
        for rule in self._stopping:
            found = rule.ends(texts, [int(at) for at in since[: len(rows)]], progress.record)
            for row, end in zip(rows, found, strict=True):
                own = self.rows[row]
                if end is not None and rule in own.stopping and progress.known[row] > own.length:
                    self._ends[row] = min(end, self._ends.get(row, end))
                    progress.cut(row, self._ends[row])
                    self.scheduler.end(row)
