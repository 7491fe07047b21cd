"""The `Runtime` protocol: owns the device and the weights, runs steps."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dflash.decode import Params
from torch_dflash.ops.windows import read_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.pytrees import register_state
from torch_dflash.record import HostRecord, read_record
from torch_dflash.rows import RowRequests
from torch_dflash.state import DecodeState, PromptChunk


@register_state
@dataclass(frozen=True)
class HostRead:
    """One host read: each row's new tokens, new acceptance lengths and position.

    ``tokens`` [B, K] from the first unknown position on, ``accepted`` [B, R] from the first unknown round on,
    ``record`` (`torch_dflash.record`) for the tokens.
    """

    tokens: Any
    accepted: Any
    length: Any
    done: Any
    rounds: Any
    record: Any

    def row(self, number: int) -> HostRead:
        """The read of one row, as of a batch of one."""
        return pytree.tree_map(lambda leaf: leaf[number : number + 1], self)


def host_read(plan: DecodePlan, state: DecodeState, known: Tensor, rounds: Tensor) -> HostRead:
    """Tokens and rounds of one chunk in ``state`` after ``known`` [B] tokens and ``rounds`` [B] rounds."""
    return HostRead(
        tokens=read_rows(state.tokens, known, plan.most_gained),
        accepted=read_rows(state.accepted, rounds, plan.rounds_per_chunk),
        length=state.length.clone(),
        done=state.done.clone(),
        rounds=state.rounds.clone(),
        record=read_record(state.record, plan, known),
    )


class Rounds(NamedTuple):
    """One chunk: ``rounds`` (at most the plan's ``rounds_per_chunk``) of ``width`` verified rows each."""

    width: int
    rounds: int

    @classmethod
    def of(cls, plan: DecodePlan) -> Rounds:
        """The most and widest rounds of ``plan``."""
        return cls(plan.verify_width, plan.rounds_per_chunk)


class RowDelta(NamedTuple):
    """A row's part of a read: new ``tokens``, tokens committed in each of its ``rounds``, whether it ended.

    Rounds may count tokens past the row's end. ``logprobs`` and ``top`` are those of the tokens, if kept: a
    number each, and pairs (id, log-probability), the likeliest first.
    """

    tokens: list[int]
    rounds: list[int]
    done: bool
    logprobs: list[float] | None = None
    top: list[list[tuple[int, float]]] | None = None


@dataclass
class Progress:
    """The host's view of a state, updated by each read. Fields as in `DecodeState`.

    ``known`` [B]: each row's tokens on the host; the prompt's are never read back. ``ended`` [B]: rows that
    gain no more tokens; a row that waits for pages is done for a while. ``widths``: rounds by the rows of
    their verify pass.
    """

    tokens: np.ndarray
    accepted: np.ndarray
    length: np.ndarray
    done: np.ndarray
    rounds: np.ndarray
    known: np.ndarray
    ended: np.ndarray
    record: HostRecord
    widths: Counter[int] = field(default_factory=Counter)

    @classmethod
    def empty(cls, plan: DecodePlan, lengths: np.ndarray) -> Progress:
        """Progress before the first read, for prompts of ``lengths`` tokens."""
        shape, zeros = (plan.batch_size, plan.slots), np.zeros(plan.batch_size, np.int32)
        known = zeros.copy()
        known[: len(lengths)] = lengths
        tokens, accepted = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
        flags = zeros.astype(bool)
        return cls(tokens, accepted, zeros, flags, zeros.copy(), known, flags.copy(), HostRecord(known))

    @property
    def committed(self) -> np.ndarray:
        """Committed tokens of each row, the anchor included."""
        return self.length + 1

    def accepted_since(self, rounds: np.ndarray) -> list[list[int]]:
        """Tokens committed in each round after the first ``rounds`` [B], for each row."""
        rows = zip(self.accepted, rounds, self.rounds, strict=True)
        return [row[since:last].tolist() for row, since, last in rows]

    def cut(self, row: int, end: int) -> None:
        """End a row before position ``end``."""
        self.length[row], self.known[row], self.ended[row] = end - 1, end, True

    def add(self, found: HostRead) -> None:
        """Update from a read."""
        for row, (since, rounds) in enumerate(zip(self.known, self.rounds, strict=True)):
            end, last = max(int(since), int(found.length[row]) + 1), int(found.rounds[row])
            self.tokens[row, since:end] = found.tokens[row, : end - since]
            self.accepted[row, rounds:last] = found.accepted[row, : last - rounds]
            self.record.add(found.record, row, int(since), end)
            self.known[row] = end
        self.length, self.done, self.rounds = (np.array(x) for x in (found.length, found.done, found.rounds))


@runtime_checkable
class Runtime(Protocol):
    """Runs steps on a device. States are opaque to the engine and consumed by each call."""

    @property
    def compilations(self) -> int:
        """Programs compiled by this thread so far."""
        ...

    def check_memory(self, tensors: Params) -> None:
        """Raise ``ValueError`` if copies of these tensors and a state exceed a device's memory."""
        ...

    def refresh(self, tensors: Params) -> Any:
        """Parameters for these live tensors; converts only changed ones."""
        ...

    def forget(self, tensors: Params) -> None:
        """Make the next `refresh` convert these tensors, changed or not."""
        ...

    def release(self) -> None:
        """Free weights and recycled caches until the next `refresh`; programs stay."""
        ...

    def fingerprint(self, tensors: Params) -> str:
        """A short digest of samples of the live tensors' bits, which differs for other weights."""
        ...

    def begin(self, params: Any, rows: RowRequests, stale: bool = False) -> Any:
        """An empty state. ``stale``: reuse buffers that still hold an earlier text.

        No step reads that text; do not hand out or save such a state.
        """
        ...

    def retire(self, state: Any) -> None:
        """Recycle the buffers of ``state``; consumes it."""
        ...

    def prefill(self, params: Any, state: Any, chunk: PromptChunk) -> Any: ...

    def admit(self, params: Any, state: Any, row: int, requests: RowRequests) -> Any:
        """`torch_dflash.rows.admit`: begin another request in ``row``; consumes ``state``."""
        ...

    def feed(self, params: Any, state: Any, row: int, chunk: PromptChunk) -> Any:
        """`torch_dflash.rows.feed`: append a prompt chunk to ``row`` alone; consumes ``state``."""
        ...

    def assign(self, state: Any, page_table: np.ndarray | None, done: np.ndarray) -> Any:
        """Set the paused rows and, for a paged cache, the page tables; consumes ``state``."""
        ...

    def record_from(self, state: Any, known: np.ndarray) -> Any:
        """Start the kept rows of logits at positions ``known`` [B]; consumes ``state``."""
        ...

    def advance(
        self, params: Any, state: Any, turn: Rounds | None = None, wanted: np.ndarray | None = None
    ) -> Any:
        """Run the rounds of ``turn`` (unset: `Rounds.of` the plan), fewer when every row is done.

        ``wanted`` [B]: rows that others wait for; the chunk ends with the round in which one is done.
        """
        ...

    def rewind(
        self, params: Any, state: Any, kept: np.ndarray, rows: RowRequests, snapshot: Any = None
    ) -> Any:
        """`torch_dflash.rows.rewind` to ``kept`` [B]; ``snapshot`` has torch tensors. Consumes both."""
        ...

    def read(self, state: Any, known: np.ndarray, rounds: np.ndarray) -> HostRead:
        """The one host read of a chunk (`host_read`), as numpy arrays."""
        ...

    def fetch(self, part: Any) -> Any:
        """A copy of a part of a state, as torch tensors."""
        ...

    def place(self, state: DecodeState) -> Any:
        """Put a state of torch tensors, such as one of `fetch`, on the runtime's device; consumes it."""
        ...

    def holds(self, state: DecodeState) -> bool:
        """Whether a user's state is on this runtime's devices."""
        ...

    def import_state(self, params: Any, state: DecodeState) -> Any:
        """Convert a user's state to the runtime's; consumes it.

        Raises:
            ValueError: the state was consumed before, or a model was cast since the state was made.
        """
        ...

    def export_state(self, params: Any, state: Any) -> DecodeState:
        """Convert a state to a user's, in the models' dtypes; consumes it."""
        ...

    def warmup(self, params: Any, buckets: list[int], progress: bool | None, slots: bool = False) -> None:
        """Compile every program of a request, and with ``slots`` `admit` and `feed`; as `Engine.warmup`."""
        ...
