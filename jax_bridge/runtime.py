"""The XLA runtime: prompt buckets, a `lax.while_loop` of rounds, one host read per chunk."""

from __future__ import annotations

from collections.abc import Callable
from copy import copy
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import jax
import numpy as np
import torch

from jax_bridge._torchax import call_torch
from jax_bridge.arrays import shape_of, to_torch
from jax_bridge.compilations import compilations, keep_programs
from jax_bridge.device_memory import bytes_of, check_memory, memory_of
from jax_bridge.devices.on_mesh import Place, places_of
from jax_bridge.devices.one_device import OneDevice
from jax_bridge.devices.samples import checksum
from jax_bridge.devices.spare import Spare, dense_layers, fit, with_caches, without_caches
from jax_bridge.mesh.cut import Cut, InBlocks
from jax_bridge.mesh.put import held_of
from jax_bridge.programs.lower import (
    Programs,
    lower,
    lower_admit,
    lower_begin,
    lower_feed,
    lower_prefill,
    lower_rounds,
    run_pipelined,
)
from jax_bridge.programs.state_dtypes import StateDtypes
from jax_bridge.state import check_alive, register_states
from jax_bridge.weights.codes import Groups
from jax_bridge.weights.formats import Multiplier, Weight
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan
from torch_dflash.progress import lasting, quiet
from torch_dflash.rows import RowRequests, rewind
from torch_dflash.runtime import HostRead, Rounds, host_read
from torch_dflash.state import DecodeState, PromptChunk

Arrays = dict[str, Weight]


class Steps(NamedTuple):
    """The functions that a pair's programs are compiled from. JAX traces each once for all devices."""

    begin: Callable
    prefill: Callable
    admit: Callable
    feed: Callable
    rewind: Callable
    rounds: dict[int, Callable]
    read: Callable

    @classmethod
    def of(cls, pair: Pair, widths: tuple[int, ...], fewest: int) -> Steps:
        """The steps of ``pair``; arguments as of `XlaRuntime`."""
        return cls(
            begin=lower_begin(pair),
            prefill=lower_prefill(pair),
            admit=lower_admit(pair),
            feed=lower_feed(pair),
            rewind=lower(partial(rewind, pair)),
            rounds={
                width: lower_rounds(pair, width, fewest) for width in widths or (pair.plan.verify_width,)
            },
            read=partial(call_torch, partial(host_read, pair.plan)),
        )


class XlaRuntime:
    """Steps of one pair on JAX's default device, or on a mesh (`torch_dflash.runtime.Runtime`).

    Args:
        compute, quantize, drafter_quantize, mesh, replicas: as in `torch_dflash.compile`. This runtime takes
            the first replica's part of the mesh; `replicas` makes the others.
        widths: of the rounds; unset: the plan's.
        fewest_rows: of a verify pass. XLA's CPU compiler fuses sums of products differently for arrays of one
            row: where products are in another type than the operations around them, that decides roundings.
    """

    def __init__(
        self,
        pair: Pair,
        plan: DecodePlan,
        compute: str = "auto",
        quantize: str | None = None,
        drafter_quantize: str | None = None,
        widths: tuple[int, ...] = (),
        fewest_rows: int = 1,
        mesh: Any = None,
        replicas: int = 1,
    ):
        here, *self._elsewhere = places_of(
            pair,
            plan,
            mesh,
            replicas,
            compute=compute,
            quantize=quantize,
            drafter_quantize=drafter_quantize,
        )
        register_states()
        keep_programs()
        self.plan, self.fewest_rows = plan, fewest_rows
        self._sizes = f"{plan.capacity} positions, batch {plan.batch_size}"
        self._sizes += f"; the text is the {quantize} model's" if quantize else ""
        self._programs = Programs(plan.matmul_precision, self._sizes, here.platform)
        self._steps = Steps.of(pair, widths, fewest_rows)
        self._settle(here)

    def replicas(self) -> list[XlaRuntime]:
        """This runtime, and copies of it on the other parts of its mesh."""
        others = [copy(self) for _ in self._elsewhere]
        for other, place in zip(others, self._elsewhere, strict=True):
            other._settle(place)
        return [self, *others]

    def _settle(self, place: Place) -> None:
        steps, self._place = self._steps, place
        self._weights = place.weights()
        self._rounds_started = False
        begin, wide = place.step(steps.begin), place.platform == "cpu"
        self._state_dtypes = StateDtypes(begin, self.plan, self._programs, wide=wide)
        self._spare = Spare() if wide and isinstance(place, OneDevice) else None
        self._prefill, self._rewind = place.step(steps.prefill), place.step(steps.rewind)
        self._row_steps = {"admit": place.step(steps.admit), "feed": place.step(steps.feed)}
        self._nobody: Any = None
        self._rounds = {width: place.step(rounds) for width, rounds in steps.rounds.items()}
        self._read = place.host_output(steps.read)

    @property
    def compilations(self) -> int:
        """XLA programs this thread has compiled so far."""
        return compilations()

    def check_memory(self, tensors: dict[str, Any]) -> None:
        """Raise ``ValueError`` if weights and state exceed a device's memory, where that is known."""
        memory = memory_of(self._place.devices)
        if memory is None:
            return
        weights = {name: shape_of(leaf) for name, leaf in tensors.items()}
        weights, state = self._place.share(weights, self._state_dtypes.shapes(weights))
        codes = Multiplier | Groups | Cut | InBlocks
        weights |= {name: held_of(leaf) for name, leaf in tensors.items() if isinstance(leaf, codes)}
        others = ", batch_size or pool_pages" if self.plan.cache == "paged" else " or batch_size"
        check_memory(
            {"weights": bytes_of(weights), "state": bytes_of(state)},
            memory,
            f"spread the pair over more of them (mesh), or lower max_length{others}",
        )

    def refresh(self, tensors: dict[str, Any]) -> Arrays:
        """Device arrays of the live weights; only changed ones are converted."""
        return self._weights.refresh(tensors)

    def forget(self, tensors: dict[str, Any]) -> None:
        """Convert these weights on their next use, changed or not."""
        self._weights.forget(tensors)

    def release(self) -> None:
        """Hold no weights and no spare caches until the next `refresh`; programs stay."""
        for part in (self._weights, self._programs, self._state_dtypes):
            part.release()
        if self._spare is not None:
            self._spare.take()

    def fingerprint(self, tensors: dict[str, Any]) -> str:
        """A checksum of samples of live weights; `jb.load` has compared a loaded target's before."""
        return checksum(tensors)

    def begin(self, params: Arrays, rows: RowRequests, stale: bool = False) -> DecodeState:
        """An empty state on the device."""
        args = params, self._place.send(rows)
        if self._spare is None:
            return self._run("begin", self._state_dtypes.begin, args)

        def begin(*args: Any) -> DecodeState:
            return without_caches(self._state_dtypes.begin(*args))

        def caches(*args: Any) -> list:
            return dense_layers(self._state_dtypes.begin(*args))

        layers = self._spare.take()
        if not stale:
            layers = []
        state = self._run("begin", begin, args)
        if not fit(state, layers):
            del layers
            # On the device like a state's other arrays: an array elsewhere would make another program.
            layers = self._place.send(self._run("caches", caches, args))
        return with_caches(state, layers)

    def retire(self, state: DecodeState) -> None:
        """Keep its dense caches, on one CPU device, for the next state that begins with ``stale``."""
        if self._spare is not None:
            self._spare.rest(state)

    def prefill(self, params: Arrays, state: DecodeState, chunk: PromptChunk) -> DecodeState:
        """Append a prompt chunk; consumes ``state``."""
        piece = self._piece(params, state, chunk)
        self._start_rounds(params, state, piece)
        return self._run(*piece)

    def _start_rounds(self, params: Arrays, state: DecodeState, piece: tuple) -> None:
        """Decoding follows a prompt's piece: compile its program together, and while the prompt is read."""
        if not self._rounds_started:
            self._rounds_started = True
            self._programs.start(*piece)
            for width in self._rounds:
                self._programs.start(*self._chunk(params, state, Rounds(width, 1)))

    def admit(self, params: Arrays, state: DecodeState, row: int, requests: RowRequests) -> DecodeState:
        """Begin another request in ``row``; consumes ``state``."""
        return self._run(*self._on_row("admit", params, state, row, requests))

    def feed(self, params: Arrays, state: DecodeState, row: int, chunk: PromptChunk) -> DecodeState:
        """Append a prompt chunk to one row, computing that row alone; consumes ``state``."""
        piece = self._on_row("feed", params, state, row, chunk)
        self._start_rounds(params, state, piece)
        return self._run(*piece)

    def assign(self, state: DecodeState, page_table: np.ndarray | None, done: np.ndarray) -> DecodeState:
        """Set the paused rows and the page tables: two small transfers."""
        put = lambda values: self._place.put(torch.tensor(values, device="cpu"))  # noqa: E731 - in JAX's own memory, for states are donated
        table = state.page_table if page_table is None else put(page_table)
        return replace(state, page_table=table, done=put(done))

    def record_from(self, state: DecodeState, known: np.ndarray) -> DecodeState:
        """Set the first position whose logits are kept: a small transfer."""
        start = self._place.put(torch.tensor(known, dtype=torch.int32, device="cpu"))
        return replace(state, record=state.record | {"start": start})

    def advance(
        self,
        params: Arrays,
        state: DecodeState,
        turn: Rounds | None = None,
        wanted: np.ndarray | None = None,
    ) -> DecodeState:
        """A chunk of rounds without a host read; consumes ``state``."""
        check_alive(state)
        return self._run(*self._chunk(params, state, turn or Rounds.of(self.plan), wanted))

    def rewind(
        self, params: Arrays, state: DecodeState, kept: np.ndarray, rows: RowRequests, snapshot: Any = None
    ) -> DecodeState:
        """Rows that continue with another prompt; consumes ``state``."""
        args = params, state, *self._place.send((kept, rows, snapshot))
        return self._run("rewind", self._rewind, args, donate=(1,))

    def read(self, state: DecodeState, known: np.ndarray, rounds: np.ndarray) -> HostRead:
        """Fetch tokens and lengths that the host lacks, in one transfer."""
        check_alive(state)
        # Of copies: a fetched buffer has a host reference and cannot be donated.
        part = replace(state, sampling=None, cache=(), proposer=(), rules=(), page_table=None)
        return jax.device_get(self._run("read", self._read, (part, *self._place.send((known, rounds)))))

    def fetch(self, part: Any) -> Any:
        """A part of a state as new torch tensors on the CPU."""
        check_alive(part)
        return to_torch(self._place.whole(part))

    def place(self, state: DecodeState) -> DecodeState:
        """A state of torch tensors as device arrays that may be donated."""
        return self._place.put_state(state)

    def holds(self, state: DecodeState) -> bool:
        """Whether a state is on these devices."""
        return isinstance(state.done, jax.Array) and state.done.sharding.device_set == self._place.devices

    def import_state(self, params: Arrays, state: DecodeState) -> DecodeState:
        """A user's state in the steps' types; consumes it."""
        return self._state_dtypes.import_state(params, self._place.adopt(state))

    def export_state(self, params: Arrays, state: DecodeState) -> DecodeState:
        """A state for a user, with caches in the models' types."""
        return self._state_dtypes.export_state(params, state)

    def warmup(self, params: Arrays, buckets: list[int], progress: bool | None, slots: bool = False) -> None:
        """Compile every prompt bucket, the rounds and the read, by running them on idle rows."""
        count = len(buckets) * (1 + slots) + len(self._rounds) + 2 + slots
        with (
            lasting(progress, f"compiling all programs for {self._sizes}", count, "program") as bar,
            quiet(progress is False or not bar.disable),
        ):
            state = self.begin(params, RowRequests.idle(self.plan))
            table = None if state.page_table is None else np.zeros(state.page_table.shape, np.int32)
            state = self.assign(state, table, np.ones(self.plan.batch_size, bool))
            state = self.import_state(params, self.export_state(params, state))
            bar.update()
            state = run_pipelined(self._programs, self._every_step(params, table, buckets, slots), state, bar)
            bar.set_description("the results' read")
            zeros = np.zeros(self.plan.batch_size, np.int32)
            self.read(state, zeros, zeros)
            self.retire(state)
            bar.update()

    def _every_step(
        self, params: Arrays, table: np.ndarray | None, buckets: list[int], slots: bool
    ) -> list[tuple]:
        """An empty prompt chunk and a round of every width, for `run_pipelined`."""
        live = np.zeros(self.plan.batch_size, bool)  # a round of paused rows would do nothing

        def piece(state: DecodeState, chunk: PromptChunk) -> tuple:
            return self._piece(params, state, chunk)

        def rounds(state: DecodeState, width: int) -> tuple:
            return self._chunk(params, self.assign(state, table, live), Rounds(width, 1))

        chunks = [partial(piece, chunk=idle_chunk(self.plan, width)) for width in buckets]
        named: list[tuple] = list(
            zip([f"prompts of {width} tokens" for width in buckets], chunks, strict=True)
        )
        if slots:
            single = replace(self.plan, batch_size=1)
            idle = RowRequests.idle(single)
            named.append(("requests of a row", lambda state: self._on_row("admit", params, state, 0, idle)))
            for width in buckets:
                chunk = idle_chunk(single, width)
                feed = partial(self._on_row, "feed", params, row=0, given=chunk)
                named.append((f"a row's prompts of {width} tokens", feed))
        return named + [(self._name(width), partial(rounds, width=width)) for width in self._rounds]

    def _piece(self, params: Arrays, state: DecodeState, chunk: PromptChunk) -> tuple:
        """Arguments of `Programs.get` for a prompt chunk."""
        return "prefill", self._prefill, (params, state, self._place.send(chunk)), (1,)

    def _on_row(self, name: str, params: Arrays, state: DecodeState, row: int, given: Any) -> tuple:
        """Arguments of `Programs.get` for "admit" or "feed" of one row."""
        args = params, state, *self._place.send((np.int32(row), given))
        return name, self._row_steps[name], args, (1,)

    def _chunk(
        self, params: Arrays, state: DecodeState, turn: Rounds, wanted: np.ndarray | None = None
    ) -> tuple:
        """Arguments of `Programs.get` for a chunk of rounds."""
        if self._nobody is None:
            self._nobody = self._place.send(np.zeros(self.plan.batch_size, bool))
        args = (
            params,
            state,
            np.int32(turn.rounds),
            self._nobody if wanted is None else self._place.send(wanted),
        )
        return self._name(turn.width), self._rounds[turn.width], args, (1,)

    def _name(self, width: int) -> str:
        return "rounds" if len(self._rounds) == 1 else f"rounds of {width}"

    def _run(self, name: str, step, args: tuple, donate: tuple[int, ...] = ()) -> Any:
        try:
            return self._programs.get(name, step, args, donate)(*args)
        except (TypeError, jax.errors.JaxRuntimeError) as error:
            if "\nKeyboardInterrupt" in str(error):  # Ctrl-C during a host callback for a grammar
                raise KeyboardInterrupt from error
            if "Computation compiled for" not in str(error):
                raise
            raise ValueError(
                f"runtime='xla': {name} cannot be lowered, for a forward of the target keeps a tensor "
                "from call to call, deep in a value; pass runtime='eager'."
            ) from error


def idle_chunk(plan: DecodePlan, width: int) -> PromptChunk:
    """An empty prompt chunk [B, ``width``]."""
    zeros = torch.zeros(plan.batch_size, dtype=torch.int32, device="cpu")
    ids = torch.zeros(plan.batch_size, width, dtype=torch.int32, device="cpu")
    return PromptChunk(ids=ids, count=zeros, following=torch.full_like(zeros, -1))
