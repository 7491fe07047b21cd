"""Where steps run. A runtime owns the parameters and the device; the engine owns the request."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from torch import Tensor

from torch_dflash.decode import Params
from torch_dflash.ops.windows import read_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.pytrees import register_state
from torch_dflash.record import Recorded, read_record
from torch_dflash.rows import RowRequests
from torch_dflash.state import DecodeState, PromptChunk


@register_state
@dataclass(frozen=True)
class HostRead:
    """What a host read fetches: each row's tokens and acceptance lengths that it lacks, and where it is.

    ``tokens`` [B, K] from the first unknown position on, ``accepted`` [B, R] from the first unknown round on,
    ``record`` (`torch_dflash.record`) as far as the tokens.
    """

    tokens: Any
    accepted: Any
    length: Any
    done: Any
    rounds: Any
    record: Any


def host_read(plan: DecodePlan, state: DecodeState, known: Tensor, rounds: Tensor) -> HostRead:
    """What ``state`` has beyond ``known`` [B] tokens and ``rounds`` [B] rounds: what one chunk can bring."""
    return HostRead(
        tokens=read_rows(state.tokens, known, plan.most_gained),
        accepted=read_rows(state.accepted, rounds, plan.rounds_per_chunk),
        length=state.length.clone(),
        done=state.done.clone(),
        rounds=state.rounds.clone(),
        record=read_record(state.record, plan, known),
    )


class Rounds(NamedTuple):
    """One chunk: ``rounds``, at most the plan's ``rounds_per_chunk``, of ``width`` verified rows each."""

    width: int
    rounds: int

    @classmethod
    def of(cls, plan: DecodePlan) -> Rounds:
        """As many rounds, and as wide ones, as ``plan`` allows."""
        return cls(plan.verify_width, plan.rounds_per_chunk)


class RowDelta(NamedTuple):
    """What a read brought a row: its ``tokens``, how many each of its ``rounds`` committed, whether it ended.

    Rounds may count tokens behind the row's end. ``logprobs`` and ``top`` are those of the tokens, where they
    are kept: a number, and pairs of an id and its own, the likeliest first.
    """

    tokens: list[int]
    rounds: list[int]
    done: bool
    logprobs: list[float] | None = None
    top: list[list[tuple[int, float]]] | None = None


@dataclass
class Progress:
    """The host's view of a state, filled by what each read brings. Fields as in `DecodeState`.

    ``known`` [B]: tokens that the host has of each row; its prompt's from the start, never read back.
    ``ended`` [B]: rows that gain nothing more; a row may be done for a while, and wait for pages.
    ``widths``: rounds by the rows of their verify pass.
    """

    tokens: np.ndarray
    accepted: np.ndarray
    length: np.ndarray
    done: np.ndarray
    rounds: np.ndarray
    known: np.ndarray
    ended: np.ndarray
    record: Recorded
    widths: Counter[int] = field(default_factory=Counter)

    @classmethod
    def empty(cls, plan: DecodePlan, lengths: np.ndarray) -> Progress:
        """Before anything is read, of rows whose prompts have ``lengths`` tokens."""
        shape, zeros = (plan.batch_size, plan.slots), np.zeros(plan.batch_size, np.int32)
        known = zeros.copy()
        known[: len(lengths)] = lengths
        tokens, accepted = np.zeros(shape, np.int32), np.zeros(shape, np.uint8)
        flags = zeros.astype(bool)
        return cls(tokens, accepted, zeros, flags, zeros.copy(), known, flags.copy(), Recorded(known))

    @property
    def committed(self) -> np.ndarray:
        """Tokens that each row holds, the anchor included."""
        return self.length + 1

    def accepted_since(self, rounds: np.ndarray) -> list[list[int]]:
        """Of each row, the tokens that each of its rounds after the first ``rounds`` [B] committed."""
        rows = zip(self.accepted, rounds, self.rounds, strict=True)
        return [row[since:last].tolist() for row, since, last in rows]

    def cut(self, row: int, end: int) -> None:
        """Forget a row's tokens from ``end`` on: it has ended there."""
        self.length[row], self.known[row], self.ended[row] = end - 1, end, True

    def add(self, found: HostRead) -> None:
        """Take in what a read has brought."""
        for row, (since, rounds) in enumerate(zip(self.known, self.rounds, strict=True)):
            end, last = max(int(since), int(found.length[row]) + 1), int(found.rounds[row])
            self.tokens[row, since:end] = found.tokens[row, : end - since]
            self.accepted[row, rounds:last] = found.accepted[row, : last - rounds]
            self.record.add(found.record, row, int(since), end)
            self.known[row] = end
        self.length, self.done, self.rounds = (np.array(x) for x in (found.length, found.done, found.rounds))


@runtime_checkable
class Runtime(Protocol):
    """Steps on a device. States are opaque to the engine and consumed by each call."""

    @property
    def compilations(self) -> int:
        """Programs this thread has compiled so far."""
        ...

    def check_memory(self, tensors: Params) -> None:
        """Raise ``ValueError`` if copies of these tensors, and a state, are more than a device holds."""
        ...

    def refresh(self, tensors: Params) -> Any:
        """Parameters for these live tensors; unchanged ones are not converted again."""
        ...

    def forget(self, tensors: Params) -> None:
        """Have the next `refresh` convert these tensors, changed or not."""
        ...

    def release(self) -> None:
        """Hold no weights and no spare caches until the next `refresh`; programs stay."""
        ...

    def fingerprint(self, tensors: Params) -> str:
        """The bits of live tensors in a few places, in short: other weights have others."""
        ...

    def begin(self, params: Any, rows: RowRequests, stale: bool = False) -> Any:
        """An empty state. ``stale``: its caches may hold an earlier text, which no step reads.

        So it is not for one that is handed out or kept on disk.
        """
        ...

    def retire(self, state: Any) -> None:
        """Let a later stale state have what ``state`` holds; consumes it."""
        ...

    def prefill(self, params: Any, state: Any, chunk: PromptChunk) -> Any: ...

    def assign(self, state: Any, page_table: np.ndarray | None, done: np.ndarray) -> Any:
        """Set which rows rest and, where the cache is paged, the page tables; consumes ``state``."""
        ...

    def record_from(self, state: Any, known: np.ndarray) -> Any:
        """Have the rows of logits that are kept begin at positions ``known`` [B]; consumes ``state``."""
        ...

    def advance(self, params: Any, state: Any, turn: Rounds | None = None) -> Any:
        """The rounds of ``turn`` (unset: `Rounds.of` the plan), fewer when every row is done."""
        ...

    def rewind(
        self, params: Any, state: Any, kept: np.ndarray, rows: RowRequests, snapshot: Any = None
    ) -> Any:
        """`torch_dflash.rows.rewind`, for ``kept`` [B]; ``snapshot`` is of torch tensors. Consumes both."""
        ...

    def read(self, state: Any, known: np.ndarray, rounds: np.ndarray) -> HostRead:
        """The one host read of a chunk: what the host does not have yet (`host_read`), as numpy arrays."""
        ...

    def fetch(self, part: Any) -> Any:
        """A part of a state as torch tensors of their own."""
        ...

    def place(self, state: DecodeState) -> Any:
        """A state of torch tensors, as `fetch` gives one, on this side of the border; consumes it."""
        ...

    def holds(self, state: DecodeState) -> bool:
        """Whether a user's state lies where this runtime's do."""
        ...

    def import_state(self, params: Any, state: DecodeState) -> Any:
        """A state that a user held as the steps keep it; consumes it.

        Raises:
            ValueError: it was consumed before, or a model was cast since it was made.
        """
        ...

    def export_state(self, params: Any, state: Any) -> DecodeState:
        """A state of the steps for a user, in the models' types; consumes it."""
        ...

    def warmup(self, params: Any, buckets: list[int], progress: bool | None) -> None:
        """Compile every program a request may need; ``progress`` as in `Engine.warmup`."""
        ...
