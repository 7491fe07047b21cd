"""The front doors: `generate` and `compile`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, cast, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torch_dflash.checks import (
    check_blocks,
    check_mesh,
    check_streamer,
    context_of,
)
from torch_dflash.engine.bridge import hosts_of
from torch_dflash.engine.engine import Engine
from torch_dflash.engine.hosts import digest_of, read_together, said_of
from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.engine.registry import cached_engine
from torch_dflash.engine.replicas import engine_of
from torch_dflash.processors.custom import HostProcessor
from torch_dflash.processors.interface import Processor
from torch_dflash.proposers.choose import Missing, check_models
from torch_dflash.requests.aliases import check_compiled_options
from torch_dflash.requests.arguments import set_aside_cache
from torch_dflash.requests.options import OF_A_CALL, OF_AN_ENGINE, EngineOptions, round_up
from torch_dflash.requests.read import check_compiled, per_token, read_request, repeated
from torch_dflash.requests.request import UNSET, Request
from torch_dflash.requests.rules import arranged, check_processors
from torch_dflash.requests.stopping import read_criteria
from torch_dflash.targets.weights import LoadedTarget, mesh_of, model_of


def compile(
    target: PreTrainedModel | LoadedTarget,
    drafter: Any = Missing,
    *,
    runtime: str = "xla",
    max_length: int | None = None,
    batch_size: int = 1,
    block_size: int | None = None,
    verify_width: int | str | None = None,
    rounds_per_chunk: int | None = None,
    stop_slots: int = 8,
    filters: bool = True,
    processors: tuple[str | Processor, ...] | None = None,
    outputs: tuple[str, ...] = (),
    top_logprobs: int = 0,
    prefill_chunk_size: int = 512,
    matmul_precision: str = "highest",
    compute: str = "auto",
    quantize: str | None = None,
    mesh: Any = None,
    replicas: int = 1,
    cache: str = "static",
    page_size: int = 64,
    pool_pages: int | None = None,
    verify: bool = True,
    **unknown: Any,
) -> Engine:
    """A reusable engine for ``target`` and ``drafter``. It keeps both alive.

    Args:
        target: a transformers causal LM, which stays untouched and usable, or what `jax_bridge.load` gave.
        drafter: a `DFlashDraftModel`, another proposer (`NGramProposer`), or None for plain decoding.
        runtime: "xla" (one compiled program on JAX's default device) or "eager" (PyTorch, on the models').
        max_length: most positions a row may fill, prompt and new tokens; unset: 1024, or all there are.
        batch_size: rows; a request with fewer is padded.
        block_size: drafted block, the anchor included; unset: the trained one.
        verify_width: how much of the block is verified, the anchor included; unset: all of it. "auto": as
            much as gains most tokens a second here, by what rounds cost and how much of the drafts is
            accepted, from none (plain decoding) to all; compiles a program for each of a few widths.
        rounds_per_chunk: rounds between host reads; unset: 16 for "xla", 1 for "eager".
        stop_slots: most stop ids a row may have.
        filters: compile top-k, top-p and min-p in.
        processors: options that requests may use besides, such as "repetition_penalty" or "grammar", and
            rules of your own (`BlockProcessor`); unset: what the model's ``generation_config`` asks for.
        outputs: what requests may be told besides: "output_scores", "output_logits", "output_logprobs".
        top_logprobs: of how many ids a request may have the log-probabilities, at each token.
        prefill_chunk_size: largest piece of a prompt, a power of two.
        matmul_precision: XLA matmul precision; "highest" keeps fp32 exact on TPU and GPU.
        compute: the type of linear products, on a CPU: "auto" (the weights' own), "float32" or "bfloat16"
            (sums in float32); norms, softmax and positions stay as they are.
        quantize: "int8" keeps linear weights in 8 bits, a scale for each output row, and quantises rows as
            they come; on a CPU. The text is that of plain decoding in the same arithmetic.
        mesh: the chips that share each weight (docs/slices.md): how many of JAX's devices, "auto" for all of
            them, or a `jax.sharding.Mesh` with the one axis "model"; of this process or of all
            (docs/hosts.md); unset: where `jax_bridge.load` put the target, else JAX's default device.
        replicas: engines alike, each on its own part of the mesh with a copy of the weights, and room for
            ``batch_size`` rows; rows go to the least busy (`Replicas`).
        cache: the target's: "static" (dense) or "paged", whose rows share pages as they grow.
        page_size: positions in a page, a multiple of 16.
        pool_pages: pages in all; unset: as many as a dense cache takes. With fewer, rows may have to wait for
            others to end; what they say does not change.
        verify: try a tiny random twin first where the target's class is not among those tested.

    Raises:
        TypeError, ValueError: something does not fit; the message names the field, the value and the fix.
        RuntimeError: ``runtime="xla"`` in a process that was forked after JAX had started.
    """
    given = {name: value for name, value in locals().items() if name in OF_AN_ENGINE}
    check_compiled_options(unknown, OF_AN_ENGINE)
    check_models(target, drafter)
    check_blocks(drafter, block_size=block_size, verify_width=verify_width)
    options = EngineOptions(**given)
    check_compiled(processors)
    engine = engine_of(target, drafter, options)
    engine.keeps_alive = (target, drafter)
    return engine


@overload
def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter: Any = Missing,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | list[int] | None = None,
    do_sample: bool | None = None,
    temperature: float | list[float] | None = None,
    seed: int | list[int] | None = None,
    eos_token_id: Any = UNSET,
    pad_token_id: int | None = None,
    processors: tuple[Processor, ...] | None = None,
    runtime: str = "xla",
    return_dict_in_generate: Literal[True],
    streamer: Any = None,
    stopping_criteria: Any = None,
    **options: Any,
) -> GenerateOutput: ...
@overload
def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter: Any = Missing,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | list[int] | None = None,
    do_sample: bool | None = None,
    temperature: float | list[float] | None = None,
    seed: int | list[int] | None = None,
    eos_token_id: Any = UNSET,
    pad_token_id: int | None = None,
    processors: tuple[Processor, ...] | None = None,
    runtime: str = "xla",
    return_dict_in_generate: Literal[False] = False,
    streamer: Any = None,
    stopping_criteria: Any = None,
    **options: Any,
) -> torch.LongTensor: ...
@overload
def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter: Any = Missing,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | list[int] | None = None,
    do_sample: bool | None = None,
    temperature: float | list[float] | None = None,
    seed: int | list[int] | None = None,
    eos_token_id: Any = UNSET,
    pad_token_id: int | None = None,
    processors: tuple[Processor, ...] | None = None,
    runtime: str = "xla",
    return_dict_in_generate: bool,
    streamer: Any = None,
    stopping_criteria: Any = None,
    **options: Any,
) -> torch.LongTensor | GenerateOutput: ...
def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter: Any = Missing,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | list[int] | None = None,
    do_sample: bool | None = None,
    temperature: float | list[float] | None = None,
    seed: int | list[int] | None = None,
    eos_token_id: Any = UNSET,
    pad_token_id: int | None = None,
    processors: tuple[Processor, ...] | None = None,
    runtime: str = "xla",
    return_dict_in_generate: bool = False,
    streamer: Any = None,
    stopping_criteria: Any = None,
    **options: Any,
) -> torch.LongTensor | GenerateOutput:
    """Generate the target's own tokens, drafted in blocks; in half precision, up to ties.

    Options left unset come from ``target.generation_config``, as in transformers' ``generate``. Those that
    may differ per row (``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``typical_p``,
    ``epsilon_cutoff``, ``eta_cutoff``, ``repetition_penalty``, ``presence_penalty``, ``frequency_penalty``,
    ``no_repeat_ngram_size``, ``min_new_tokens``, ``seed``, ``eos_token_id`` as a list of lists) take one
    value or one per row, rows counted after ``num_return_sequences``.

    Honoured: lengths, stop ids, sampling and its filters, penalties, bans, biases, forced ids. Refused by
    name: all else that changes the text.

    Args:
        target: a transformers causal LM, or what `jax_bridge.load` gave.
        drafter: a `DFlashDraftModel`, another proposer, or None for plain autoregressive decoding.
        input_ids: LongTensor [B, T], padded on either side.
        attention_mask: [B, T], 1 = real token.
        max_new_tokens: hard cap. temperature: 0 is greedy. streamer: transformers', for one row.
        seed: in [-2**63, 2**64); row b of a batch uses ``seed + b``; unset: drawn from torch's generator.
        eos_token_id: unset: the model's; None or []: never stop.
        pad_token_id: fills rows that ended early; unset: the model's, else its first stop id.
        processors: rules of your own (`BlockProcessor`, `HostProcessor`), after the options'.
        stopping_criteria: transformers', or functions of (ids [B, T], scores so far or None): asked on the
            host. Others than stop strings and a time are asked once a token, so that nothing is drafted;
            ``runtime="eager"``.
        return_dict_in_generate: return ``.sequences`` and ``.stats``, and with ``output_scores``,
            ``output_logits``, ``output_logprobs`` or ``top_logprobs=K`` what `GenerateOutput` says of them.
        runtime: as in `compile`.
        **options: ``block_size``, ``verify_width``, ``rounds_per_chunk``, ``cache``, ``page_size``,
            ``prefill_chunk_size``, ``matmul_precision``, ``compute``, ``quantize``, ``mesh``, ``replicas``
            and ``verify`` as in `compile`; ``grammar``, a `Grammar` that the new tokens keep to, or a list of
            one or None a row; ``response_format``, as OpenAI's API has it, with the ``tokenizer``;
            ``generation_config`` or any field of one. Other arguments of transformers' are
            taken where they ask for nothing: an empty cache or list, a tokenizer, the positions of the mask.

    Returns:
        LongTensor [B, T + new]: prompt, new tokens (stop id included), padding; or `GenerateOutput`.

    Raises:
        TypeError, ValueError: bad input, before any generation starts. RuntimeError: ``runtime="xla"`` in a
            process that was forked after JAX had started.
    """
    options |= {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "seed": seed,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "stopping_criteria": stopping_criteria,
        "return_dict_in_generate": return_dict_in_generate,
    }
    given = input_ids, attention_mask, options
    asked = read_call("generate", target, drafter, given, processors, runtime, streamer)
    output = asked.engine().run(asked.request, asked.input_ids, streamer)
    return output if return_dict_in_generate else output.sequences


@dataclass(frozen=True)
class PreparedCall:
    """A call that was read: its ``request``, prompts [B, T] as they are repeated, and the engine it needs."""

    target: Any
    drafter: Any
    request: Request
    input_ids: Tensor
    options: EngineOptions

    def engine(self) -> Engine:
        """The engine, made by this call or one before."""
        if any(isinstance(one, HostProcessor) for one in self.options.processors or ()):
            return engine_of(self.target, self.drafter, self.options)  # no other call has this one
        return cached_engine(self.target, self.drafter, self.options)


def read_call(
    what: str,
    target: Any,
    drafter: Any,
    given: tuple[Any, Any, dict[str, Any]],
    processors: tuple[Processor, ...] | None,
    runtime: str,
    streamer: Any = None,
) -> PreparedCall:
    """Check all arguments of a call that makes its own engine.

    Args:
        what: the call, as other processes hear of it.
        given: prompts, mask and options; the others and ``streamer``: as in `generate`.

    Raises:
        TypeError, ValueError: bad input. RuntimeError: other processes of the mesh make another call.
    """

    def read(input_ids: Any, attention_mask: Any, options: dict[str, Any]) -> PreparedCall:
        call = _read_call(target, drafter, input_ids, attention_mask, options, processors, runtime)
        check_streamer(streamer, len(call.request.rows))
        return call

    check_models(target, drafter)
    asked, replicas = given[2].get("mesh"), given[2].get("replicas", 1)
    check_mesh(asked, runtime, replicas)
    mesh = mesh_of(target, asked, replicas)
    said = said_of(hosts := hosts_of(runtime, mesh, replicas), mesh, target, drafter)

    def digest(call: PreparedCall) -> dict[str, str]:  # the mesh by its order, however it is named
        return digest_of(call.request, replace(call.options, mesh=None)) | call.engine().bits()

    return read_together(hosts, what, said, given, read, digest)


def _read_call(
    target: Any,
    drafter: Any,
    input_ids: Any,
    attention_mask: Any,
    options: dict[str, Any],
    processors: tuple[Processor, ...] | None,
    runtime: str,
) -> PreparedCall:
    set_aside_cache(options)
    built: dict[str, Any] = {name: options.pop(name) for name in OF_A_CALL if name in options}
    check_processors(processors)
    criteria = options.pop("stopping_criteria", None)
    input_ids, attention_mask = repeated(target, input_ids, attention_mask, options)
    request = read_request(target, input_ids, attention_mask, options)
    pad, prompts = request.pad_token_id, cast(Tensor, input_ids)
    request.stopping.extend(
        read_criteria(criteria or (), prompts, request.lengths, pad, request.logit_outputs.normalised)
    )
    own = [_with_prompts(one, prompts) for one in processors or ()]
    alone = per_token(request, own, runtime)
    check_blocks(drafter, **{name: built.get(name) for name in ("block_size", "verify_width")})
    replicas = built.get("replicas", 1)
    rows = -(-len(request.rows) // replicas)  # of each replica
    engine_options = EngineOptions(
        max_length=_capacity(request, model_of(target)),
        # XLA compiles per batch size: round up. Eagerly, idle rows would only cost time.
        batch_size=rows if runtime == "eager" else 1 << (rows - 1).bit_length(),
        stop_slots=max(8, *map(len, request.stop_ids)),
        filters=request.filters,
        processors=arranged([*request.processors, *own]),
        outputs=request.logit_outputs.outputs,
        top_logprobs=request.logit_outputs.top_logprobs,
        runtime=runtime,
        **(built | alone),
    )
    return PreparedCall(target, drafter, request, prompts, engine_options)


def _with_prompts(one: Any, prompts: Tensor) -> Any:
    return replace(one, prompts=prompts) if isinstance(one, HostProcessor) and not one.pure else one


def _capacity(request: Request, target: PreTrainedModel) -> int:
    """The room of an engine that holds the longest row, or ``ValueError`` where the target has none."""
    needed = max(request.limits)
    context = context_of(target)
    if needed > context:
        row = request.limits.index(needed)
        raise ValueError(
            f"row {row}: a prompt of {request.lengths[row]} tokens and max_new_tokens="
            f"{request.max_new_tokens[row]} exceed the target's max_position_embeddings={context}; shorten "
            "them."
        )
    return round_up(needed, context)
