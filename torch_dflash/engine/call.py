"""`Call`: the rows of one request in `Slots`; `map_prompts`: any number of prompts, one after another."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Generator, Iterable, Iterator, Mapping, Sized
from dataclasses import replace
from itertools import islice, repeat, starmap
from queue import Empty, SimpleQueue
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_dflash.checks import check_counts
from torch_dflash.engine.outputs import GenerateOutput, Share, collect
from torch_dflash.engine.slots import Handle, Service, Slots, Version
from torch_dflash.record import HostRecord
from torch_dflash.requests.read import CallOptions
from torch_dflash.requests.request import Request
from torch_dflash.requests.row_values import row_seeds
from torch_dflash.runtime import Progress, RowDelta


class Call:
    """One request on the rows of `Slots`; its results arrive in the caller's thread."""

    def __init__(self, slots: Slots, request: Request, version: Version):
        self.request, self._slots = request, slots
        self._started, self._compiled = time.perf_counter(), slots.compilations
        self._deltas: SimpleQueue[tuple[int, RowDelta | None]] = SimpleQueue()
        rows = [request.of_row(row) for row in range(len(request.rows))]
        self.handles = slots.enqueue(rows, version, lambda row, delta: self._deltas.put((row, delta)))

    def run(self, streamer: object = None) -> GenerateOutput:
        """Decode all rows; an error of one ends the call, when the others have stopped."""
        put = getattr(streamer, "put", lambda ids: None)
        try:
            put(self.request.input_ids.cpu())
            for deltas in self.reads():
                if 0 in deltas and deltas[0].tokens:
                    put(torch.tensor(deltas[0].tokens))
        finally:
            self.cancel()
            self._slots.settle(self.handles)
        getattr(streamer, "end", lambda: None)()
        return self._output()

    def gains(self, logprobs: bool, top: bool) -> Generator[list[RowDelta], None, None]:
        """Yield every row's new tokens, read by read; rows of other replicas gain nothing then."""
        over = [False] * len(self.handles)
        try:
            for deltas in self.reads():
                over = [deltas[row].done if row in deltas else done for row, done in enumerate(over)]
                nothing = [
                    RowDelta([], [], done, [] if logprobs else None, [] if top else None) for done in over
                ]
                yield [deltas.get(row, nothing[row]) for row in range(len(over))]
        finally:
            self.cancel()

    def reads(self) -> Iterator[dict[int, RowDelta]]:
        """Yield what rows have gained, until all have ended.

        Raises:
            Exception: what ended a row.
        """
        running = len(self.handles)
        while running:
            found: dict[int, RowDelta] = {}
            entry = self._slots.next_of(self._deltas)
            while entry is not None:
                row, delta = entry
                if delta is None:
                    running -= 1
                    self.handles[row].result()
                elif row in found:
                    yield found
                    found = {row: delta}
                else:
                    found[row] = delta
                try:
                    entry = self._deltas.get_nowait()
                except Empty:
                    entry = None
            if found:
                yield found

    def cancel(self) -> None:
        """Give up every row that has not ended. Takes no lock: garbage collection may run this."""
        for handle in self.handles:
            handle.cancel()

    def _output(self) -> GenerateOutput:
        """All rows as one output, as if one batch had decoded them."""
        services = [handle.service for handle in self.handles if handle.service is not None]
        read_at = sorted({at - self._started for each in services for at in each.read_at})
        found = _joined([each.progress for each in services])
        prefilled = sum(each.prefilled for each in services)
        output = collect(self.request, found, read_at, self._slots.compilations - self._compiled, prefilled)
        shares = _shares(services, output.stats.acceptance_lengths, self._slots.replicas)
        output.stats = replace(output.stats, replicas=shares)
        return output


def _joined(rows: list[Progress]) -> Progress:
    """One batch of several, each of one row."""
    names = ("tokens", "accepted", "length", "done", "rounds", "known", "ended")
    columns = {name: np.concatenate([getattr(row, name) for row in rows]) for name in names}
    record = HostRecord.joined([(row.record, [at]) for at, row in enumerate(rows)])
    return Progress(**columns, record=record, widths=sum((row.widths for row in rows), Counter()))


def _shares(services: list[Service], lengths: list[list[int]], replicas: int) -> tuple[Share, ...]:
    """Each replica's rows, and its rounds in which one of them was under way; nothing of a single engine."""
    shares = []
    for replica in range(replicas if replicas > 1 else 0):
        own = [
            (each.first_round, each.first_round + len(row))
            for each, row in zip(services, lengths, strict=True)
            if each.replica == replica
        ]
        rounds = end = 0
        for first, last in sorted(own):
            rounds += max(0, last - max(first, end))
            end = max(end, last)
        shares.append(Share(len(own), rounds))
    return tuple(shares)


def map_prompts(
    engine: Any,
    slots: Slots,
    prompts: Iterable[Any],
    options: Iterable[Mapping[str, Any]] | None,
    shared: dict[str, Any],
    ahead: int | None,
) -> Iterator[GenerateOutput]:
    """The outputs of ``prompts`` in their order; arguments as of `Engine.map`."""
    if isinstance(prompts, Tensor | str | Mapping) or not isinstance(prompts, Iterable):
        kind = type(prompts).__name__ + (f" {tuple(prompts.shape)}" if isinstance(prompts, Tensor) else "")
        raise TypeError(f"prompts={kind}: pass unpadded lists of ids, tokenizer(texts).input_ids.")
    counts = [len(each) for each in (prompts, options) if isinstance(each, Sized)]
    if len(counts) == 2 and counts[0] != counts[1]:
        raise ValueError(f"prompts has {counts[0]} entries, options {counts[1]}: pass one mapping a prompt.")
    if ahead is not None:
        check_counts(ahead=ahead)
    engine.follow()
    version, (first,) = engine.version(), row_seeds(shared.get("seed"), 1)
    plain = shared | {"return_dict_in_generate": True, "seed": first}
    call = engine.split(plain)

    def read(number: int, prompt: Any, own: Mapping[str, Any]) -> Request:
        try:
            seeded = {"seed": (first + number) % 2**64}
            requested = engine.split(plain | seeded | dict(own)) if own else _seeded(call, seeded)
            request = engine.read_rows(*_ids_of(prompt), requested)
            if len(request.rows) != 1:
                raise ValueError("num_return_sequences: map gives an output a prompt; repeat the prompt.")
        except (TypeError, ValueError) as error:
            raise type(error)(f"prompt {number}: {error}") from error
        return request

    numbered = _paired(prompts, repeat({}) if options is None else options)
    rows = engine.plan.batch_size * slots.replicas
    return _in_order(starmap(read, numbered), slots, version, rows, ahead or AHEAD * rows)


def _in_order(
    requests: Iterator[Request], slots: Slots, version: Version, rows: int, ahead: int
) -> Iterator[GenerateOutput]:
    """Results in order; at most ``ahead`` requests are under way. An error comes in its turn.

    The first ``rows`` requests are submitted at once: they begin together.
    """
    waiting: deque[Handle] = deque()
    error: Exception | None = None

    def read(most: int) -> list[Request]:
        nonlocal error
        found: list[Request] = []
        try:
            found.extend(islice(requests, most))
        except Exception as raised:
            error = raised
        return found

    try:
        more = read(min(rows, ahead))
        while more:
            waiting += slots.enqueue(more, version)
            if len(waiting) >= ahead:
                yield waiting.popleft().result()
            more = read(1) if error is None else []
        while waiting:
            yield waiting.popleft().result()
        if error is not None:
            raise error
    finally:
        for handle in waiting:
            handle.cancel()


def _paired(
    prompts: Iterable[Any], options: Iterable[Mapping[str, Any]]
) -> Iterator[tuple[int, Any, Mapping[str, Any]]]:
    """Numbers, prompts and their own options; of iterators the lengths are not known before."""
    own = iter(options)
    for number, prompt in enumerate(prompts):
        found = next(own, None)
        if found is None:
            raise ValueError(
                f"prompts has more than {number} entries, options {number}: pass one mapping a prompt."
            )
        if not isinstance(found, Mapping):
            raise TypeError(
                f"options: entry {number} is a {type(found).__name__}; pass one mapping a prompt."
            )
        yield number, prompt, found


def _ids_of(prompt: Any) -> tuple[Tensor, Tensor]:
    """A prompt as ids and mask [1, T]."""
    try:
        ids = torch.as_tensor(prompt) if len(prompt) else torch.zeros(0, dtype=torch.long)
    except (TypeError, ValueError, RuntimeError):
        raise TypeError(f"{str(prompt)[:40]!r}: pass token ids, tokenizer(text).input_ids.") from None
    ids = ids[None] if ids.ndim == 1 else ids
    return ids, torch.ones_like(ids)


def _seeded(call: CallOptions, own: dict[str, Any]) -> CallOptions:
    return replace(call, own=replace(call.own, **own))


AHEAD = 4
"""Requests of `Engine.map` under way at once for each row: while a slow one holds up the results."""
