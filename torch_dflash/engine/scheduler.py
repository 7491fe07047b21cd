"""Decides between two chunks which rows decode in the next, and which wait for pages."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from torch import Tensor

from torch_dflash.engine.pages import PageAllocator
from torch_dflash.plan import DecodePlan
from torch_dflash.requests.request import Row

READ = ("length", "limit", "page_table", "done", "tokens", "stop_ids")
"""The fields of a `DecodeState` that `Scheduler.of` needs on the host: kilobytes, and no cache."""


class Step(NamedTuple):
    """``prefill``: rows whose prompt is read now; page table and ``done`` [B], None if they are unchanged."""

    prefill: list[int]
    page_table: np.ndarray | None
    done: np.ndarray | None


class Scheduler:
    """Lets rows start, go on and wait. With a dense cache all start at once and none ever waits.

    A row that has to wait for pages rests for a chunk: it is marked done, and goes on later as if nothing
    had happened.

    Args:
        plan: the engine's.
        lengths: positions of each row that are committed, or are to be: its prompt.
        limits: most positions each row may hold.
        page_table: [B, row_pages], pages that rows hold already, of a paged cache.
    """

    def __init__(
        self, plan: DecodePlan, lengths: list[int], limits: list[int], page_table: np.ndarray | None = None
    ):
        self.plan, self.limits = plan, limits
        self.lengths = np.array(lengths)
        self.ended = np.arange(plan.batch_size) >= len(lengths)
        self._waiting = list(range(len(lengths)))
        self._done = self.ended.copy()  # as the device has it
        self._allocator, self._table = None, None
        if plan.cache == "paged":
            self._allocator = PageAllocator(plan, [limit + plan.gain for limit in limits], page_table)
            self._table = self._allocator.table.copy()  # as the device has it

    @classmethod
    def for_rows(cls, plan: DecodePlan, rows: list[Row], page_table: np.ndarray | None = None) -> Scheduler:
        """A scheduler for rows whose prompts are still to be read."""
        return cls(plan, [row.length for row in rows], [row.limit for row in rows], page_table)

    @classmethod
    def idle(cls, plan: DecodePlan) -> Scheduler:
        """A scheduler without a request; `seat` gives rows to some."""
        scheduler = cls(plan, [0] * plan.batch_size, [0] * plan.batch_size)
        scheduler.ended[:], scheduler._done[:] = True, True
        scheduler._waiting = []
        return scheduler

    @classmethod
    def of(cls, plan: DecodePlan, read: dict[str, Tensor]) -> Scheduler:
        """A scheduler that resumes a state of a paged cache, by its fields `READ`; its prompts are read."""
        length, limit, table, done = (read[name].numpy() for name in READ[:4])
        anchor = read["tokens"].gather(1, read["length"][:, None].long())
        stopped = (anchor == read["stop_ids"]).any(dim=1).numpy()
        scheduler = cls(plan, length.tolist(), limit.tolist(), table)
        scheduler.ended = done & (stopped | (length + 1 >= limit))
        scheduler._waiting, scheduler._done = [], done
        return scheduler

    @property
    def over(self) -> bool:
        """Whether every row has ended."""
        return bool(self.ended.all())

    def next_step(self) -> Step:
        """Reserve what the next chunk can write, for rows under way first, then for waiting ones."""
        going = self.going()
        due = [row for row in self._waiting if self._reserve(row)]
        self._waiting = [row for row in self._waiting if row not in due]
        return Step(due, *self.changes([*going, *due]))

    def going(self) -> list[int]:
        """The rows under way that have pages for the next chunk; takes back the pages of those that ended."""
        live = [row for row in np.flatnonzero(~self.ended).tolist() if row not in self._waiting]
        if self._allocator is not None:
            for row in np.flatnonzero(self.ended).tolist():
                self._allocator.release(row)
        return [row for row in live if self._reserve(row)]

    def seat(self, row: int, length: int, limit: int) -> bool:
        """Give ``row``, whose request has ended, to another if there are pages for its next chunk."""
        self.lengths[row], self.limits[row] = length, limit
        if self._allocator is not None:
            self._allocator.renew(row, limit + self.plan.gain)
        seated = self._reserve(row)
        self.ended[row] = not seated
        return seated

    def changes(self, live: list[int], anew: bool = False) -> tuple[np.ndarray | None, np.ndarray | None]:
        """Page table and ``done`` [B] with which ``live`` decode; None if the device has both.

        ``anew``: the device has those of other requests.
        """
        done = np.ones(self.plan.batch_size, bool)
        done[live] = False
        table = None if self._allocator is None else self._allocator.table.copy()
        same = table is None or self._table is not None and np.array_equal(table, self._table)
        if same and np.array_equal(done, self._done) and not anew:
            return None, None
        self._done, self._table = done, table
        return table, done

    def update(self, length: np.ndarray, done: np.ndarray) -> None:
        """Take in what the host has read after the chunk: the state's ``length`` and ``done`` [B]."""
        self.ended |= done & ~self._done
        self._done = done.copy()
        count = len(self.lengths)
        self.lengths = np.where(length[:count] > 0, length[:count], self.lengths)

    def end(self, row: int) -> None:
        """Let a row rest for good, whatever the device would do with it."""
        self.ended[row] = True

    def _reserve(self, row: int) -> bool:
        """Pages for all positions that a chunk can write, were every draft accepted."""
        plan = self.plan
        reach = min(int(self.lengths[row]) + plan.rounds_per_chunk * plan.gain, self.limits[row])
        return self._allocator is None or self._allocator.reserve(row, reach + plan.gain)
