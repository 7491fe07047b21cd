"""`Desk`: gives rows to the replica with the fewest, while it has room."""

from __future__ import annotations

import threading
from collections import deque
from typing import NamedTuple

from torch_dflash.engine.call import Call


class Group(NamedTuple):
    """Rows of a call that a replica decodes together."""

    replica: int
    call: Call
    rows: list[int]


class Desk:
    """Deals rows out. Calls that find no free row wait in a line, in which each takes its turn.

    Args:
        replicas: how many. room: rows that one decodes at once, of however many calls.
    """

    def __init__(self, replicas: int, capacity: int):
        self._capacity = capacity
        self._busy, self._taken = [0] * replicas, [0] * replicas  # rows now, and so far
        self._line: deque[Call] = deque()
        self._lock = threading.Lock()

    def queue(self, call: Call) -> list[Group]:
        """Take a call in; what begins now."""
        with self._lock:
            self._line.append(call)
            return self._deal()

    def over(self, group: Group) -> list[Group]:
        """A group has ended; what begins now."""
        with self._lock:
            self._busy[group.replica] -= len(group.rows)
            return self._deal()

    def least_busy(self) -> int:
        """A replica for a row that the desk does not see end."""
        with self._lock:
            replica = self._next()
            self._taken[replica] += 1
            return replica

    def close(self, call: Call) -> None:
        """Deal no more of a call."""
        with self._lock:
            call.stopped = True

    def _deal(self) -> list[Group]:
        groups: list[Group] = []
        while self._line:
            call, found = self._line[0], {}
            while call.waiting and not call.stopped and self._busy[replica := self._next()] < self._capacity:
                found.setdefault(replica, []).append(call.waiting.popleft())
                self._busy[replica] += 1
                self._taken[replica] += 1
            call.groups += len(found)
            groups += [Group(replica, call, rows) for replica, rows in found.items()]
            if call.waiting and not call.stopped and not found:
                break  # no free row
            self._line.popleft()
            if call.waiting and not call.stopped:
                self._line.append(call)
        return groups

    def _next(self) -> int:
        """The replica with the fewest rows now, then with the fewest so far."""
        return min(range(len(self._busy)), key=lambda at: (self._busy[at], self._taken[at], at))
