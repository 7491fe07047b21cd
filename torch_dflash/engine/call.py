"""`Call`: one call's rows on several replicas; their results arrive in the caller's thread."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass
from queue import SimpleQueue
from typing import Any

import numpy as np

from torch_dflash.record import HostRecord
from torch_dflash.requests.request import Request
from torch_dflash.runtime import Progress, RowDelta


@dataclass(frozen=True)
class Part:
    """A replica's result for some ``rows`` of a call; ``progress`` has them in this order.

    ``read_at`` holds when each host read ended (`time.perf_counter`); the rest as in `DecodeStats`.
    """

    replica: int
    rows: list[int]
    progress: Progress
    read_at: list[float]
    compilations: int
    prefilled: int


class Call:
    """One request on its way through the replicas.

    Args:
        request: all rows.
        params: the weights, as each replica's runtime holds them.

    Attributes:
        waiting: rows that no replica has taken yet. groups: how many were handed out together.
        parts: what is done. stopped: nobody wants more.
    """

    def __init__(self, request: Request, params: list[Any]):
        self.request, self.params = request, params
        self.waiting = deque(range(len(request.rows)))
        self.groups, self._over = 0, 0
        self.parts: list[Part] = []
        self.stopped = False
        self._reports: SimpleQueue[dict[int, RowDelta] | Part | BaseException | None] = SimpleQueue()

    def report(self, result: dict[int, RowDelta] | Part | BaseException | None) -> None:
        """Called by replicas: the new tokens of rows; at last, once a group, its part, an error, or None."""
        self._reports.put(result)

    def gains(self) -> Iterator[dict[int, RowDelta]]:
        """Yield the rows' new tokens, read by read, until all rows have ended.

        Raises:
            Exception: what a replica raised.
        """
        while sum(len(part.rows) for part in self.parts) < len(self.request.rows):
            report = self._next()
            if isinstance(report, BaseException):
                try:
                    raise report
                finally:
                    del report  # which its own traceback would hold
            if isinstance(report, Part):
                self.parts.append(report)
            elif report is not None:
                yield report

    def rest(self) -> None:
        """Wait until no replica is at work on it; they stop after the chunk that they are in."""
        while self._over < self.groups:
            self._next()

    def progress(self) -> Progress:
        """The last read of every row, in the order in which they were asked for."""
        order = np.argsort([row for part in self.parts for row in part.rows])

        def rows(name: str) -> np.ndarray:
            parts = [getattr(part.progress, name)[: len(part.rows)] for part in self.parts]
            return np.concatenate(parts)[order]

        names = ("tokens", "accepted", "length", "done", "rounds", "known", "ended")
        record = HostRecord.joined([(part.progress.record, part.rows) for part in self.parts])
        widths = sum((part.progress.widths for part in self.parts), Counter())
        return Progress(**{name: rows(name) for name in names}, record=record, widths=widths)

    def _next(self) -> dict[int, RowDelta] | Part | BaseException | None:
        report = self._reports.get()
        self._over += not isinstance(report, dict)
        return report
