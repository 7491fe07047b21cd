"""`Engine`: a compiled pair that reads requests, runs them and returns their tokens."""

from __future__ import annotations

import threading
import time
import weakref
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, closing, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, TypeVar, Unpack, overload

import numpy as np
import torch
from torch import Tensor

from torch_dflash.checks import check_context, check_counts, check_streamer, check_target, context_of
from torch_dflash.decode import Pair
from torch_dflash.engine.batch import Generation
from torch_dflash.engine.bridge import make_runtimes, warn_of_device
from torch_dflash.engine.call import Call, map_prompts
from torch_dflash.engine.models import Models, check_entry, marked
from torch_dflash.engine.outputs import Deltas, GenerateOutput, collect, tokens_of
from torch_dflash.engine.scheduler import Scheduler
from torch_dflash.engine.session import Session
from torch_dflash.engine.slots import Slots, Version
from torch_dflash.engine.width import UNLIMITED, Pace, Widths, widths_of
from torch_dflash.guards.processes import OfOneProcess
from torch_dflash.plan import MIN_BUCKET, DecodePlan
from torch_dflash.processors.interface import Processor
from torch_dflash.progress import warn
from torch_dflash.proposers.choose import make_proposer
from torch_dflash.record import WHOLE
from torch_dflash.requests.logprobs import check_top
from torch_dflash.requests.options import EngineOptions, GenerateOptions
from torch_dflash.requests.read import CallOptions, check_each_fits, check_fits, read_options, read_request
from torch_dflash.requests.request import Request, Row
from torch_dflash.requests.rules import arranged, of_the_model
from torch_dflash.runtime import Progress, RowDelta, Runtime
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.state import DecodeState
from torch_dflash.targets.adapter import Target
from torch_dflash.targets.guard import Guard
from torch_dflash.targets.tested import check_instance
from torch_dflash.targets.weights import Restructured, arrays_of, mesh_of, model_of
from torch_dflash.verify.check import verify_class

T = TypeVar("T")
KEPT = 4
"""Copies of its models that an engine keeps: as they are, and as they were before, with their programs."""


@dataclass(frozen=True)
class Built:
    """Everything that an engine has made of its models as they were at one time."""

    pair: Pair
    models: Models
    widths: Widths
    runtimes: Sequence[Runtime]


class Engine(OfOneProcess):
    """Built by `torch_dflash.compile` for a pair and a capacity. Any thread may call it."""

    def __init__(self, target: Any, drafter: Any, options: EngineOptions | None = None):
        options = options or EngineOptions()
        self._arrays = arrays_of(target, options.runtime, options.compute, options.quantize)
        if self._arrays is not None:  # `jax_bridge.load` has quantised already
            options = replace(options, quantize=options.quantize or target.quantize)
        self.options = options
        self._mesh = mesh_of(target, options.mesh, options.replicas)
        self.keeps_alive: Any = None
        self._building = threading.RLock()
        self._given = weakref.ref(target)
        self._earlier: list[Built] = []  # of the models as they were before
        self._take(self._build(target, drafter))

    @property
    def plan(self) -> DecodePlan:
        """The shapes and kinds that its programs are compiled for."""
        return self._built.pair.plan

    @property
    def pair(self) -> Pair:
        """The skeletons of target and proposer."""
        return self._built.pair

    @property
    def runtime(self) -> Runtime:
        """The runtime that runs its steps."""
        return self._built.runtimes[0]

    @property
    def _models(self) -> Models:
        return self._built.models

    @property
    def _widths(self) -> Widths:
        return self._built.widths

    def _build(self, target: Any, drafter: Any) -> Built:
        """Copy the models as they are now, check the copy, and make runtimes for it."""
        options, model = self.options, model_of(target)
        check_target(model)
        if options.max_length is None:
            options = replace(options, max_length=min(1024, context_of(model)))
        check_instance(model)
        for _ in range(KEPT):
            guard = Guard(model)
            skeleton = Target(model)
            if guard.holds():  # no other thread changed the model meanwhile
                break
        guard.ignore(skeleton.written)
        check_context(model, options.max_length or 0)
        warn_of_device(model, options.runtime)
        proposer = make_proposer(model, drafter, options.block_size)
        plan = options.plan(proposer.width, proposer.depth)
        check_top(plan.top_logprobs, skeleton.vocab_size)
        plan = replace(plan, processors=self._processors(model, skeleton.vocab_size))
        pair = Pair(skeleton, proposer, plan)
        if options.verify:
            verify_class(model, plan, options.runtime, skeleton.recurrent)
        models = Models(pair, model, drafter, self._arrays, guard)
        widths = widths_of(options, plan)
        runtimes = make_runtimes(options, pair, widths, model.dtype, self._mesh, models.tensors())
        return Built(pair, models, widths, runtimes)

    def _take(self, built: Built) -> None:
        """Go on with ``built``; the one before lets go of its weights."""
        for one in self._earlier[:1]:
            for runtime in one.runtimes:
                runtime.release()
        self._built = built
        self._earlier = [built, *(one for one in self._earlier if one is not built)][:KEPT]

    def follow(self) -> None:
        """Build anew if a model is no longer what was copied: its modules, hooks, attributes, config or code.

        Weights are no part of this; every call reads them.
        """
        with self._building:
            if not self._models.hold():
                self._rebuild()

    def _rebuild(self) -> None:
        for built in self._earlier[1:]:
            if built.models.hold():  # an adapter that was switched back
                return self._take(built)
        target, drafter = self._given() or self._models.target, self._models.drafter
        name, compiles = type(self._models.target).__name__, RUNTIMES[self.options.runtime].compiles
        done = "its programs compile anew" if compiles else "it is copied anew"
        warn(f"{name} or its drafter was changed since this engine was built; {done}.")
        return self._take(self._build(target, self.pair.proposer if drafter is None else drafter))

    def tensors(self) -> dict[str, Any]:
        """The live weights, or a loaded target's arrays, by the pair's names. Changes are seen."""
        try:
            return self._models.tensors()
        except Restructured:  # resized, untied, or with other modules
            with self._building:
                self._rebuild()
                return self._models.tensors()

    def refresh(self) -> None:
        """Have the next call take all weights anew, however they were written, and see other changes now.

        The XLA runtime keeps copies. It sees each write that torch counts, and a step of a fused optimiser.
        Weights or rows that ``.data`` wrote are seen some calls later, a part of a row never: call this then.
        """
        self.follow()
        self.runtime.forget(self._live())

    def warmup(self, progress: bool | None = None, slots: bool = False) -> Engine:
        """Compile every prompt bucket and the decoding loop, so that no later call compiles.

        ``slots``: also the programs of `map`, `slots` and calls of more rows than ``batch_size``.

        With ``verify_width="auto"`` a few rounds of each width also show what it costs on this machine, as
        far as ``max_length`` has room for them.

        ``progress``: show a bar with the name of what is compiled; None: where stderr is a terminal, and
        elsewhere one line, if all of it takes longer than a second.
        """
        buckets, width = [], MIN_BUCKET
        while width <= min(self.options.prefill_chunk_size, self.plan.slots):  # as `chunk_widths` chooses
            buckets.append(width)
            width *= 2
        self.follow()
        self.synchronize("warmup")
        with self.shared("warmup"):
            params = self._params()
            self.runtime.warmup(params, buckets, progress, slots)
            if not self._widths.measured:
                self._measure_widths(params)
        return self

    @overload
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        streamer: Any = None,
        return_dict_in_generate: Literal[True],
        **options: Unpack[GenerateOptions],
    ) -> GenerateOutput: ...
    @overload
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        streamer: Any = None,
        return_dict_in_generate: Literal[False] = False,
        **options: Unpack[GenerateOptions],
    ) -> torch.LongTensor: ...
    @overload
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        streamer: Any = None,
        return_dict_in_generate: bool,
        **options: Unpack[GenerateOptions],
    ) -> torch.LongTensor | GenerateOutput: ...
    def generate(
        self,
        input_ids: Tensor,
        attention_mask: Tensor | None = None,
        *,
        streamer: Any = None,
        return_dict_in_generate: bool = False,
        **options: Any,
    ) -> torch.LongTensor | GenerateOutput:
        """Decode a batch; arguments and result as in `torch_dflash.generate`."""
        requested = options | {"return_dict_in_generate": return_dict_in_generate}
        output = self.run(self._read("generate", input_ids, attention_mask, requested, streamer), streamer)
        return output if return_dict_in_generate else output.sequences

    def run(self, request: Request, streamer=None) -> GenerateOutput:
        """Decode a request that `read`, of this engine or of another for the same target, has read."""
        started = time.perf_counter()
        compiled = self.runtime.compilations
        self._check(request)
        if (slots := self._slots_for(request)) is not None:
            return Call(slots, request, self.version()).run(streamer)
        times, deltas = [], Deltas(request.lengths)
        with self.shared("generate"):
            params = self._params()  # refuses models that were changed, before a streamer has anything
            if streamer is not None:
                streamer.put(request.input_ids.cpu())
            generation = self._begin(request.rows, params)
            for progress in self._steps(generation):
                times.append(time.perf_counter() - started)
                if streamer is not None and (tokens := deltas.by(progress)[0].tokens):
                    streamer.put(torch.tensor(tokens))
        if streamer is not None:
            streamer.end()
        compiled = self.runtime.compilations - compiled
        return collect(request, progress, times, compiled, generation.prefilled)

    def stream(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Unpack[GenerateOptions]
    ) -> Iterator[list[list[int]]]:
        """Yield, after each chunk of rounds, the tokens each row gained. May be abandoned at any point."""
        # Checked here, not at the first `next`: a generator's body would run only then.
        requested = {**options, "return_dict_in_generate": False}
        return tokens_of(self.gains(self._read("stream", input_ids, attention_mask, requested)))

    def gains(self, request: Request) -> Generator[list[RowDelta], None, None]:
        """Yield each row's new tokens, chunk by chunk."""
        if (slots := self._slots_for(request)) is not None:
            kept = "output_logprobs" in self.plan.outputs, bool(self.plan.top_logprobs)
            yield from Call(slots, request, self.version()).gains(*kept)
            return
        with self.shared("stream"):
            steps = self._steps(self._begin(request.rows, self._params()), streamed=True)
        with closing(steps):  # at once, though a traceback holds it
            yield from map(Deltas(request.lengths).by, steps)

    def map(
        self,
        prompts: Iterable[Any],
        options: Iterable[Mapping[str, Any]] | None = None,
        *,
        ahead: int | None = None,
        **shared: Any,
    ) -> Iterator[GenerateOutput]:
        """Decode any number of prompts; yield an output of one row for each, in their order.

        A row that has ended is given to the next prompt while the others decode. Prompts are read as their
        turn comes, the weights once. Prompt n says what row n of one `generate` would: its seed is
        ``seed + n``.

        Args:
            prompts: ids of each without padding: lists, or tensors [T] or [1, T].
            options: one mapping a prompt, over the options that all share; as of `generate`.
            ahead: prompts that may be under way while the results wait for an earlier one; unset: four
                times as many as decode together.

        Raises:
            TypeError, ValueError: bad options at once; a bad prompt when its turn comes, after the outputs
                of all before it.
        """
        return map_prompts(self, self._own_slots(), prompts, options, shared, ahead)

    def slots(self, queue: int | None = None) -> Slots:
        """Rows for requests that come at any time, from any thread; a thread decodes while there are some.

        ``queue``: most requests that may wait; None: any number.
        """
        if queue is not None:
            check_counts(queue=queue)
        return Slots(self, queue, threads=True)

    def session(self) -> Session:
        """A row that goes on from request to request: what a prompt shares with it is not read again."""
        check_entry(self.pair, self.options.runtime)
        read = partial(self._read, "session")
        return Session(lambda: (self.runtime, self.pair), read, self._params, self._steps)

    def start(
        self, input_ids: Tensor, attention_mask: Tensor | None = None, **options: Unpack[GenerateOptions]
    ) -> DecodeState:
        """The state after prefill, on the runtime's side of the border; options as in `generate`."""
        requested = {**options, "return_dict_in_generate": False}
        request = self._read("start", input_ids, attention_mask, requested)
        check_fits(request, self.plan)
        rows = request.rows
        if any(row.stopping for row in rows):
            raise ValueError(
                "stop_strings, max_time: a state that is handed out cannot end by them; call generate."
            )
        if any(row.grammar for row in rows):
            raise ValueError(
                "grammar: it ends with its call, which a state that is handed out outlives; call generate."
            )
        if set(self.plan.outputs) & set(WHOLE.values()):
            raise ValueError(
                f"outputs={self.plan.outputs}: logits are kept from one read to the next, and a state that "
                "is handed out is not read; compile an engine without them."
            )
        due = Scheduler.for_rows(self.plan, rows).next_step().prefill
        if len(due) < len(rows):
            raise ValueError(
                f"pool_pages={self.plan.pool_pages}: pages for {len(due)} of {len(rows)} rows at "
                "once; compile with more, or call generate, where rows wait for each other."
            )
        with self.shared("start"):
            params = self._params()
            generation = self._begin(rows, params, stale=False)
            generation.prepare(self.options.prefill_chunk_size)
            return self.runtime.export_state(params, generation.state)

    def advance(self, state: DecodeState) -> DecodeState:
        """One chunk of rounds; consumes ``state``. It may come from another engine with an equal plan.

        Raises:
            ValueError: ``state`` is of another plan or proposer, or consumed. TypeError: across the border.
        """
        self.synchronize("advance", state)
        with self.shared("advance"):
            params = self._params()
            state, turn = self.runtime.import_state(params, state), self._widths.settled()
            if self.plan.cache == "static":
                return self.runtime.export_state(params, self.runtime.advance(params, state, turn))
            generation = Generation.resume(self.runtime, self.plan, params, state)
            generation.prepare(self.options.prefill_chunk_size)
            generation.advance(turn)
            return self.runtime.export_state(params, generation.state)

    def read(self, input_ids: Any, attention_mask: Any, options: Mapping[str, Any]) -> Request:
        """A call's arguments as a request that this engine can serve.

        Raises:
            TypeError, ValueError: naming what cannot be honoured, before anything runs.
        """
        self.follow()
        return self.read_rows(input_ids, attention_mask, self.split(options))

    def split(self, options: Mapping[str, Any]) -> CallOptions:
        """A call's options by who reads them; errors as of `read`."""
        return read_options(self._models.target, options)

    def read_rows(self, input_ids: Any, attention_mask: Any, options: CallOptions) -> Request:
        """As `read`, without a look at the models: they were looked at for options split before."""
        request = read_request(self._models.target, input_ids, attention_mask, options)
        self._check(request)
        return request

    def version(self) -> Version:
        """The copy of the models and the weights of each replica, for requests that come now."""
        tensors = self._live()
        return Version(self._built, [runtime.refresh(tensors) for runtime in self._built.runtimes])

    def place(self, state: DecodeState) -> DecodeState:
        """A state of torch tensors, of an engine with this one's plan, on this side of the border."""
        return self.runtime.place(state)

    def _check(self, request: Request) -> None:
        check_each_fits(request, self.plan)

    def _own_slots(self) -> Slots:
        """Slots that the caller's thread steps."""
        return Slots(self)

    def _slots_for(self, request: Request) -> Slots | None:
        """Slots for a request of more rows than decode together."""
        return self._own_slots() if len(request.rows) > self.plan.batch_size else None

    def synchronize(self, what: str, state: Any = None, read: Callable[[], Any] = lambda: None) -> Any:
        """``read()``, in the call ``what`` of ``state``; several processes do it together."""
        return read()

    def compare(self, what: str, read: Callable[[], T], digest: Callable[[T], dict[str, str]]) -> T:
        """``read()``; an engine of several processes compares its ``digest``."""
        return read()

    def shared(self, what: str) -> AbstractContextManager[None]:
        """While open, an engine of several processes ends all of them if this one fails."""
        return nullcontext()

    def _processors(self, model: Any, vocab_size: int) -> tuple[Processor, ...]:
        """Those that the options name; if they leave them open, what the model's own config asks for."""
        given, slots = self.options.processors, self.options.stop_slots
        return of_the_model(model.generation_config, slots, vocab_size) if given is None else arranged(given)

    def _params(self) -> Any:
        return self.runtime.refresh(self._live())

    def _live(self) -> dict[str, Any]:
        """The weights that a call is to use."""
        check_entry(self.pair, self.options.runtime)
        return self.tensors()

    def _read(
        self, what: str, input_ids: Any, attention_mask: Any, options: Mapping[str, Any], streamer: Any = None
    ) -> Request:
        """As `read`, for the call ``what``."""
        check_entry(self.pair, self.options.runtime)
        request = self.read(input_ids, attention_mask, options)
        check_streamer(streamer, len(request.rows))
        return request

    def _begin(self, rows: list[Row], params: Any, stale: bool = True) -> Generation:
        return Generation.begin(self.runtime, self.plan, params, rows, stale)

    def _steps(self, generation: Generation, streamed: bool = False) -> Generator[Progress, None, None]:
        return marked(self.pair, generation.steps(self.options.prefill_chunk_size, self._widths))

    def _measure_widths(self, params: Any) -> None:
        """Run every width on a text of no meaning, whatever it loses, so that no request has to try them."""
        row = Row(np.zeros(1, np.int32), self.plan.capacity - 1)
        generation = self._begin([row] * self.plan.batch_size, params)
        generation.pace = Pace(ahead=UNLIMITED)
        for _ in self._steps(generation):
            if self._widths.measured:
                break
        self._widths.forget_text()
