"""`Session`: one row that continues from request to request, without reading a shared prefix again."""

from __future__ import annotations

import time
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from torch_dflash.decode import Pair
from torch_dflash.engine.batch import Generation
from torch_dflash.engine.outputs import DecodeStats, Deltas, stats_of
from torch_dflash.guards.processes import OfOneProcess
from torch_dflash.requests.logprobs import check_streamed
from torch_dflash.requests.request import Request, Row
from torch_dflash.rows import earliest, snapshot_of
from torch_dflash.runtime import Progress, RowDelta, Runtime

SNAPSHOTS = 8
"""The latest that a session keeps, on the host: each may be as large as a drafter's window and the target's
recurrent states."""


class Session(OfOneProcess):
    """Keeps the state of its last request; each text is that of a fresh one. Made by `Engine.session`.

    A prompt goes on behind what it shares with the text that is held. Where the proposer, or a recurrent
    layer, cannot go back so far, it goes on from the last snapshot before, or begins anew. Weights that
    torch saw written since, a changed model, and an error in mid-step, make it begin anew, too.

    Args:
        built: the engine's runtime and pair, which are others once a model was changed.
        read: ``(input_ids, attention_mask, options) -> Request``, checked.
        params: gives the weights as the runtime holds them now.
        steps: runs a generation, chunk by chunk.

    Attributes:
        stats: of the last request, as far as it came; ``prefilled`` is what had to be read.
    """

    def __init__(
        self,
        built: Callable[[], tuple[Runtime, Pair]],
        read: Callable[[Any, Any, dict[str, Any]], Request],
        params: Callable[[], Any],
        steps: Callable[[Generation], Iterator[Progress]],
    ):
        self._built, self._read = built, read
        self._runtime, self._pair = built()
        self._params, self._steps = params, steps
        self._state: Any = None
        self._held = np.zeros(0, np.int32)  # the text of the state, its anchor included
        self._snapshots: list[tuple[int, Any]] = []  # tokens held then, and what they left
        self._weights: list[Any] = []
        self._current: object = None
        plan = self._pair.plan
        self._forgets = earliest(self._pair, self._pair.proposer.start(plan, "meta"), plan.capacity) > 0
        self.stats: DecodeStats | None = None

    def gains(self, prompt: list[int], settled: int = 0, **options: Any) -> Iterator[RowDelta]:
        """Yield the row's new tokens, chunk by chunk; may be left at any point.

        Args:
            prompt: the whole text.
            settled: how many of its tokens the next one will share at least, as far as one can tell.
            **options: as in `Engine.generate`.

        Raises:
            TypeError, ValueError: something cannot be honoured; nothing has changed. RuntimeError, later on:
                another request has begun.
        """
        ids = torch.tensor([prompt])
        request = self._read(ids, torch.ones_like(ids), options | {"return_dict_in_generate": True})
        check_streamed(request.logprobs)
        if len(request.rows) != 1:
            raise ValueError(f"num_return_sequences={len(request.rows)}: one text goes on; call generate.")
        return self._run(request, settled)

    def _run(self, request: Request, settled: int) -> Iterator[RowDelta]:
        self._current = current = object()
        started, compiled = time.perf_counter(), self._runtime.compilations
        generation, prefilled = self._begin(request, settled)
        prompt, times = request.rows[0].prompt, []
        deltas = Deltas(request.lengths)
        steps = self._steps(generation)
        while True:
            if self._current is not current:
                raise RuntimeError("this text was left for a later request of its session; it cannot go on.")
            self._state = None  # until the step is over: what it consumes is lost in an error
            progress = next(steps, None)
            self._state = generation.state
            if progress is None:
                return
            times.append(time.perf_counter() - started)
            self._held = np.concatenate([prompt, progress.tokens[0, len(prompt) : progress.known[0]]])
            fresh = self._runtime.compilations - compiled
            read = prefilled + generation.prefilled
            self.stats = stats_of(request, progress, times, fresh, read)
            yield deltas.by(progress)[0]

    def _begin(self, request: Request, settled: int) -> tuple[Generation, int]:
        """The generation of a request, and the tokens that were read before it."""
        params = self._params()
        if self._built()[0] is not self._runtime:
            self._runtime, self._pair = self._built()
            self._weights = []
        if not _unchanged(self._weights, params):
            self._state, self._weights = None, [_mark(leaf) for leaf in params.values()]
        row = request.rows[0]
        prompt = row.prompt
        (kept, snapshot), read = self._place(prompt), 0
        settled = min(settled, len(prompt) - 1)
        if self._forgets and kept < settled:
            part = self._go_on(params, replace(row, prompt=prompt[:settled], stopping=()), kept, snapshot)
            next(self._steps(part))  # which reads the prompt alone
            taken = self._runtime.fetch(snapshot_of(self._pair, part.state))
            self._snapshots = [*self._snapshots, (settled, taken)][-SNAPSHOTS:]
            self._state, kept, snapshot, read = part.state, settled, None, part.prefilled
        return self._go_on(params, row, kept, snapshot), read

    def _place(self, prompt: np.ndarray) -> tuple[int, Any]:
        """(Tokens of ``prompt`` that need not be read again, the snapshot to continue from)."""
        if self._state is None:
            self._snapshots = []
            return 0, None
        most = min(len(self._held), len(prompt))
        differs = np.flatnonzero(self._held[:most] != prompt[:most])
        equal = int(differs[0]) if len(differs) else most
        # An anchor has no K/V, and a prompt's end is read.
        common = max(min(most - 1, equal - self._pair.proposer.ahead), 0)
        self._snapshots = [one for one in self._snapshots if one[0] <= common]
        # The state may be ahead of the text, where that was cut.
        length = int(self._runtime.fetch(self._state.length)[0])
        if common >= earliest(self._pair, self._state.proposer, length):
            return common, None
        return self._snapshots[-1] if self._snapshots else (0, None)

    def _go_on(self, params: Any, row: Row, kept: int, snapshot: Any) -> Generation:
        state, self._state = self._state, None  # freed, or consumed
        plan = self._pair.plan
        if kept == 0:
            del state
            return Generation.begin(self._runtime, plan, params, [row])
        if snapshot is not None:
            snapshot = pytree.tree_map(torch.clone, snapshot)
        return Generation.go_on(self._runtime, plan, params, state, [row], [kept], snapshot)


def _mark(weight: Any) -> Any:
    """Changes with every write that torch counts; of a device's array, which is never written, itself."""
    if not isinstance(weight, Tensor):
        return weakref.ref(weight)
    return weight.data_ptr(), None if weight.is_inference() else weight._version


def _unchanged(marks: list[Any], params: dict[str, Any]) -> bool:
    same = [
        mark() is leaf if isinstance(mark, weakref.ref) else mark == _mark(leaf)
        for mark, leaf in zip(marks, params.values(), strict=False)
    ]
    return len(marks) == len(params) and all(same)
