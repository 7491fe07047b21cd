"""A compiled pair that serves many requests: buffers, chunks and host reads, never the algorithm."""

from __future__ import annotations

import time
import weakref
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from torch_dflash.checks import (
    check_context,
    check_counts,
    check_flag,
    check_runtime,
    check_streamer,
    check_target,
)
from torch_dflash.decode import Pair
from torch_dflash.engine.calls import read_request, row_requests
from torch_dflash.engine.outputs import GenerateOutput, collect
from torch_dflash.engine.prompts import bucket, prompt_chunks
from torch_dflash.engine.request import Request
from torch_dflash.engine.scheduler import READ, Admission, Turn
from torch_dflash.plan import MIN_BUCKET, DecodePlan
from torch_dflash.proposers.choose import make_proposer
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.runtime import EagerRuntime, Progress, Runtime
from torch_dflash.state import DecodeState
from torch_dflash.target.adapter import Target
from torch_dflash.target.weights import LoadedTarget, collect_tensors, model_of, named_arrays
from torch_dflash.verification.agreement import verify_class

LARGEST_CHUNK = 512


class Engine:
    """Built once for a pair and a capacity, then immutable: any thread may call it, each call has its state.

    Made by `torch_dflash.compile`; see there for the arguments.
    """

    def __init__(
        self,
        target: Any,
        drafter,
        *,
        runtime: str = "xla",
        max_length: int = 1024,
        batch_size: int = 1,
        block_size: int | None = None,
        verify_width: int | None = None,
        rounds_per_chunk: int | None = None,
        stop_slots: int = 8,
        filters: bool = True,
        prefill_chunk_size: int = LARGEST_CHUNK,
        matmul_precision: str = "highest",
        cache: str = "static",
        page_size: int = 64,
        pool_pages: int | None = None,
        verify: bool = True,
    ):
        check_runtime(runtime)
        # The arrays of a target without torch weights; they lead back to none of the user's objects.
        self._arrays = target.arrays_for(runtime) if isinstance(target, LoadedTarget) else None
        target = model_of(target)
        check_target(target)
        check_counts(max_length=max_length, batch_size=batch_size, rounds_per_chunk=rounds_per_chunk)
        check_counts(verify_width=verify_width, prefill_chunk_size=prefill_chunk_size)
        check_counts(page_size=page_size, pool_pages=pool_pages)
        check_counts(least=0, stop_slots=stop_slots)
        check_flag(verify=verify, filters=filters)
        if prefill_chunk_size != bucket(prefill_chunk_size):
            raise ValueError(
                f"prefill_chunk_size={prefill_chunk_size}: must be a power of two of at least 16."
            )
        skeleton = Target(target)
        check_context(target, max_length)
        proposer = make_proposer(target, drafter, block_size)
        width = proposer.width
        self.plan = DecodePlan(
            batch_size=batch_size,
            capacity=max_length,
            block_size=width,
            verify_width=width if verify_width is None else verify_width,
            stop_slots=stop_slots,
            # A chunk ends in one host read: worth batching on a device, free in eager mode.
            rounds_per_chunk=rounds_per_chunk or (16 if runtime == "xla" else 1),
            filters=filters,
            matmul_precision=matmul_precision,
            cache=cache,
            page_size=page_size,
            pool_pages=pool_pages,
        )
        self.largest_chunk = prefill_chunk_size
        self.pair = Pair(skeleton, proposer, self.plan)
        if verify:
            verify_class(target, self.plan, runtime)
        self.keeps_alive: Any = None
        self._target = weakref.ref(target)
        # A proposer without tensors was copied whole; nothing of the user's need live on.
        weightless = not [*self.pair.proposer.parameters(), *self.pair.proposer.buffers()]
        self._drafter = None if drafter is None or weightless else weakref.ref(drafter)
        self.tensors()  # refuses a model that its config does not describe
        self.runtime: Runtime = _make_runtime(runtime, self.pair, self.plan)

    def tensors(self) -> dict[str, Any]:
        """The live weights, or a loaded target's arrays, by the pair's names. Changes are seen."""
        target = self._live_target()
        if self._arrays is None:
            tensors = collect_tensors(self.pair.target.model, target, "target.model.")
        else:
            tensors = named_arrays(self.pair.target.model, self._arrays, "target.model.")
        if self._drafter is not None:
            drafter, proposer = self._drafter(), self.pair.proposer
            if drafter is None:
                raise RuntimeError("the engine's drafter was deleted; keep a reference to it.")
            if isinstance(drafter, DFlashDraftModel):
                tensors |= collect_tensors(proposer.drafter, drafter, "proposer.drafter.")
            else:
                tensors |= collect_tensors(proposer, drafter, "proposer.")
        return tensors

    def refresh(self) -> None:
        """Have the next call take all weights anew, however they were written.

        The XLA runtime keeps copies. It sees each write that torch counts, and whole weights that a fused
        optimiser, ``.data`` or a numpy view wrote. A few rows written so may go unseen: call this then.
        """
        self.runtime.forget(self.tensors())

    def _live_target(self) -> PreTrainedModel:
        target = self._target()
        if target is None:
            raise RuntimeError("the engine's target was deleted; keep a reference to the model.")
        return target

    def warmup(self, progress: bool | None = None) -> Engine:
        """Compile every prompt bucket and the decoding loop, so that no later call compiles.

        ``progress``: show a bar with the name of what is compiled; None: where stderr is a terminal.
        """
        buckets, width = [], MIN_BUCKET
        while width <= min(self.largest_chunk, self.plan.slots):  # as `chunk_widths` chooses them
            buckets.append(width)
            width *= 2
        self.runtime.warmup(self.runtime.refresh(self.tensors()), buckets, progress)
        return self

    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        streamer=None,
        return_dict_in_generate: bool = False,
        **options: Any,
    ) -> torch.LongTensor | GenerateOutput:
        """Decode a batch; arguments and result as in `torch_dflash.generate`."""
        started = time.perf_counter()
        compiled = self.runtime.compilations
        rows, request = self._prepare(input_ids, attention_mask, options)
        check_streamer(streamer, len(rows))
        lengths = [len(row) for row in rows]
        if streamer is not None:
            streamer.put(input_ids.cpu())
        times, shown = [], 0
        for progress in self._run(rows, request):
            times.append(time.perf_counter() - started)
            if streamer is not None:
                shown = _put_new(streamer, progress, lengths[0], shown)
        if streamer is not None:
            streamer.end()
        compiled = self.runtime.compilations - compiled
        output = collect(input_ids, lengths, progress, request.pad_token_id, times, compiled)
        return output if return_dict_in_generate else output.sequences

    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any
    ) -> Iterator[list[list[int]]]:
        """Yield, after each chunk of rounds, the tokens each row gained. May be abandoned at any point."""
        # Checked here, not at the first `next`: a generator's body would run only then.
        return self._stream(*self._prepare(input_ids, attention_mask, options))

    def _stream(self, rows: list[np.ndarray], request: Request) -> Iterator[list[list[int]]]:
        shown = [len(row) for row in rows]
        for progress in self._run(rows, request):
            # A row that waits for pages has not read its prompt yet.
            ends = [max(start, int(progress.length[row]) + 1) for row, start in enumerate(shown)]
            yield [
                progress.tokens[row, start:end].tolist()
                for row, (start, end) in enumerate(zip(shown, ends, strict=True))
            ]
            shown = ends

    def start(self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Any) -> DecodeState:
        """The state after prefill, on the runtime's side of the border; options as in `generate`."""
        rows, request = self._prepare(input_ids, attention_mask, options)
        params, admission = self.runtime.refresh(self.tensors()), self._admission(rows, request)
        turn = admission.next_turn()
        if len(turn.fed) < len(rows):
            raise ValueError(
                f"pool_pages={self.plan.pool_pages}: pages for {len(turn.fed)} of {len(rows)} rows at once; "
                "compile with more, or call generate, where rows wait for each other."
            )
        state = self.runtime.begin(params, row_requests(rows, request, self.plan))
        return self._take_turn(params, state, turn, rows)

    def advance(self, state: DecodeState) -> DecodeState:
        """One chunk of rounds; consumes ``state``. It may come from another engine with an equal plan.

        Raises:
            ValueError: on the XLA runtime, ``state`` was consumed by an earlier call.
        """
        params = self.runtime.refresh(self.tensors())
        if self.plan.cache == "paged":
            read = self.runtime.fetch({name: getattr(state, name) for name in READ})
            admission = Admission.of(self.plan, read)
            state = self._take_turn(params, state, admission.next_turn(), [])
        return self.runtime.advance(params, state)

    def _admission(self, rows: list[np.ndarray], request: Request) -> Admission:
        lengths = [len(row) for row in rows]
        limits = [a + b for a, b in zip(lengths, request.max_new_tokens, strict=True)]
        return Admission(self.plan, lengths, limits)

    def _take_turn(self, params: Any, state: Any, turn: Turn, rows: list[np.ndarray]) -> DecodeState:
        """Give the rows what the host decided for the next chunk, and read the prompts whose turn it is."""
        if turn.done is not None:
            state = self.runtime.assign(state, turn.pages, turn.done)
        if turn.fed:
            fed = [prompt if row in turn.fed else prompt[:0] for row, prompt in enumerate(rows)]
            for chunk in prompt_chunks(fed, self.plan.batch_size, self.largest_chunk, self.plan.slots):
                state = self.runtime.prefill(params, state, chunk)
        return state

    def _prepare(self, input_ids, attention_mask, options) -> tuple[list[np.ndarray], Request]:
        target = self._live_target()
        rows, request = read_request(target, input_ids, attention_mask, options)
        plan = self.plan
        if len(rows) > plan.batch_size:
            raise ValueError(
                f"input_ids has {len(rows)} rows, the engine was compiled for batch_size={plan.batch_size}; "
                "compile with a larger one."
            )
        for row, (prompt, budget) in enumerate(zip(rows, request.max_new_tokens, strict=True)):
            if len(prompt) + budget > plan.capacity:
                raise ValueError(
                    f"row {row}: a prompt of {len(prompt)} tokens and max_new_tokens={budget} exceed "
                    f"max_length={plan.capacity}; shorten them or compile with a larger max_length."
                )
        most = max(map(len, request.stop_ids))
        if most > plan.stop_slots:
            raise ValueError(
                f"eos_token_id has {most} ids, the engine stop_slots={plan.stop_slots}; compile with more."
            )
        if request.filters and not plan.filters:
            raise ValueError(
                "top_k, top_p or min_p was asked for (top_k=50 is transformers' default when sampling), but "
                "the engine was compiled with filters=False; compile with filters=True or pass top_k=0."
            )
        return rows, request

    def _run(self, rows: list[np.ndarray], request: Request) -> Iterator[Progress]:
        """Prefill, then chunks of rounds until every row has ended; the host reads once after each."""
        runtime, admission = self.runtime, self._admission(rows, request)
        params = runtime.refresh(self.tensors())
        state = runtime.begin(params, row_requests(rows, request, self.plan))
        first = True
        while not admission.over:
            state = self._take_turn(params, state, admission.next_turn(), rows)
            if not first:
                state = runtime.advance(params, state)
            first = False
            progress = runtime.read(state)
            admission.update(progress.length, progress.done)
            yield progress


def _put_new(streamer, progress: Progress, prompt_length: int, shown: int) -> int:
    start, end = prompt_length + shown, int(progress.length[0]) + 1
    if end > start:
        streamer.put(torch.from_numpy(progress.tokens[0, start:end].astype(np.int64)))
    return end - prompt_length


def _make_runtime(name: str, pair: Pair, plan: DecodePlan) -> Runtime:
    if name == "eager":
        return EagerRuntime(pair, plan)
    from jax_bridge.runtime import XlaRuntime  # the one door from torch_dflash to JAX

    return XlaRuntime(pair, plan)
