"""`EngineOptions`: the only list of engine options; others are derived from it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from typing import Any, TypedDict, cast

from torch_dflash.checks import (
    Cache,
    Precision,
    check_arithmetic,
    check_cache,
    check_counts,
    check_flag,
    check_mesh,
    check_precision,
    check_runtime,
    check_width,
)
from torch_dflash.guards.processes import check_process
from torch_dflash.guards.reentry import OWN_STEP, check_outside
from torch_dflash.plan import OUTPUTS, DecodePlan
from torch_dflash.processors.custom import HostProcessor
from torch_dflash.processors.interface import Processor
from torch_dflash.requests.logprobs import check_outputs
from torch_dflash.requests.prompts import bucket
from torch_dflash.requests.rules import check_processors
from torch_dflash.runtime_kinds import RUNTIMES

LARGEST_CHUNK = 512


def _of_a_call(default: Any) -> Any:
    """An option that `torch_dflash.generate` takes, too; the others follow there from the request."""
    return field(default=default, metadata={"call": True})


@dataclass(frozen=True, kw_only=True)
class EngineOptions:
    """Options of `torch_dflash.compile`; see there for what they mean.

    Raises:
        ValueError: a value is of the wrong type or out of range, whatever the models are. RuntimeError: this
            process was forked from one that JAX runs in, or a `HostProcessor` asks for itself.
    """

    runtime: str = _of_a_call("xla")
    max_length: int | None = None
    batch_size: int = 1
    block_size: int | None = _of_a_call(None)
    verify_width: int | str | None = _of_a_call(None)
    rounds_per_chunk: int | None = _of_a_call(None)
    stop_slots: int = 8
    filters: bool = True
    processors: tuple[str | Processor, ...] | None = None
    outputs: tuple[str, ...] = ()
    top_logprobs: int = 0
    prefill_chunk_size: int = _of_a_call(LARGEST_CHUNK)
    matmul_precision: str = _of_a_call("highest")
    compute: str = _of_a_call("auto")
    quantize: str | None = _of_a_call(None)
    drafter_quantize: str | None = _of_a_call(None)
    mesh: Any = _of_a_call(None)
    replicas: int = _of_a_call(1)
    cache: str = _of_a_call("static")
    page_size: int = _of_a_call(64)
    pool_pages: int | None = None
    verify: bool = _of_a_call(True)

    def __post_init__(self):
        check_runtime(self.runtime)
        check_process(self.runtime)
        for name in ("max_length", "batch_size", "block_size", "rounds_per_chunk"):
            check_counts(**{name: getattr(self, name)})
        check_width(self.verify_width)
        check_counts(prefill_chunk_size=self.prefill_chunk_size, page_size=self.page_size)
        check_counts(pool_pages=self.pool_pages)
        check_counts(least=0, stop_slots=self.stop_slots)
        check_flag(verify=self.verify, filters=self.filters)
        check_cache(self.cache)
        check_precision(self.matmul_precision)
        check_processors(self.processors)
        check_outputs(self.outputs, self.top_logprobs)
        self._check_host()
        check_arithmetic(self.compute, self.quantize, self.runtime, self.drafter_quantize)
        check_mesh(self.mesh, self.runtime, self.replicas)
        if self.prefill_chunk_size != bucket(self.prefill_chunk_size):
            raise ValueError(
                f"prefill_chunk_size={self.prefill_chunk_size}: must be a power of two of at least 16."
            )

    def _check_host(self) -> None:
        own = [one for one in self.processors or () if isinstance(one, HostProcessor)]
        if own and not RUNTIMES[self.runtime].asks_host:
            raise ValueError(
                f"processors holds {own[0].name}, which runs on the host: pass runtime='eager', or write "
                "it as a td.BlockProcessor."
            )
        check_outside(*(one.function for one in own), why=OWN_STEP)
        impure = [one.name for one in own if not one.pure]
        if impure and self.verify_width != 1:
            raise ValueError(
                f"processors holds {impure[0]}, which sees one token at a time: pass verify_width=1, or "
                "td.HostProcessor(..., pure=True) if its scores follow from ids and scores alone."
            )

    def plan(self, width: int, depth: int | None = None) -> DecodePlan:
        """The plan of these options with a proposer of these attributes, and without processors."""
        kept = {*self.outputs, *(["output_logprobs"] if self.top_logprobs else [])}
        return DecodePlan(
            batch_size=self.batch_size,
            capacity=cast(int, self.max_length),
            block_size=width,
            verify_width=self.verify_width if isinstance(self.verify_width, int) else width,
            depth=depth,
            stop_slots=self.stop_slots,
            rounds_per_chunk=self.rounds_per_chunk or RUNTIMES[self.runtime].rounds_per_chunk,
            filters=self.filters,
            outputs=tuple(name for name in OUTPUTS if name in kept),
            top_logprobs=self.top_logprobs,
            matmul_precision=cast(Precision, self.matmul_precision),
            cache=cast(Cache, self.cache),
            page_size=self.page_size,
            pool_pages=self.pool_pages,
        )


OF_AN_ENGINE = tuple(option.name for option in fields(EngineOptions))
OF_A_CALL = tuple(option.name for option in fields(EngineOptions) if "call" in option.metadata)


SMALLEST = 256
LARGEST_DOUBLED = 2048


def round_up(needed: int, context: int) -> int:
    """The room for a row that ends at ``needed``, never more than the target's ``context``.

    Every size is a compilation. A chat grows with each turn, so up to 2,048 positions sizes double: idle
    positions cost little there. Above, where they cost memory and time, an octave has four sizes.
    """
    octave = 1 << (needed - 1).bit_length()
    step = octave if octave <= LARGEST_DOUBLED else octave // 8
    return min(max(SMALLEST, -(-needed // step) * step), context)


class GenerateOptions(TypedDict, total=False):
    """Options of `torch_dflash.generate`: of this library, of an engine, and of transformers."""

    # Of a call here.
    seed: int | list[int] | None
    tokenizer: Any
    processors: tuple[Processor, ...] | None
    stopping_criteria: Any
    presence_penalty: float | list[float] | None
    frequency_penalty: float | list[float] | None
    grammar: Any
    response_format: Any
    output_logprobs: bool | None
    top_logprobs: int | None
    position_ids: Any
    generation_config: Any
    # Of the engine behind the call.
    runtime: str
    block_size: int | None
    verify_width: int | str | None
    rounds_per_chunk: int | None
    prefill_chunk_size: int
    matmul_precision: str
    compute: str
    quantize: str | None
    drafter_quantize: str | None
    mesh: Any
    replicas: int
    cache: Any
    page_size: int
    verify: bool
    # Of transformers' GenerationConfig.
    max_new_tokens: int | list[int] | None
    max_length: int | None
    min_new_tokens: int | list[int] | None
    min_length: int | None
    do_sample: bool | None
    temperature: float | list[float] | None
    top_k: int | list[int] | None
    top_p: float | list[float] | None
    min_p: float | list[float] | None
    typical_p: float | list[float] | None
    epsilon_cutoff: float | list[float] | None
    eta_cutoff: float | list[float] | None
    repetition_penalty: float | list[float] | None
    no_repeat_ngram_size: int | list[int] | None
    bad_words_ids: Any
    suppress_tokens: Any
    begin_suppress_tokens: Any
    sequence_bias: Any
    forced_bos_token_id: int | None
    forced_eos_token_id: Any
    exponential_decay_length_penalty: Any
    eos_token_id: Any
    pad_token_id: int | None
    stop_strings: str | list[str] | None
    max_time: float | None
    num_return_sequences: int | None
    output_scores: bool | None
    output_logits: bool | None
