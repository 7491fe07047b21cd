"""The front doors: `generate` and `compile`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal, Unpack, overload

import torch
from torch import Tensor
from transformers import PreTrainedModel

from torch_dflash.checks import check_blocks, check_mesh, check_streamer
from torch_dflash.engine.bridge import hosts_of
from torch_dflash.engine.engine import Engine
from torch_dflash.engine.hosts import digest_of, facts_of, read_broadcast
from torch_dflash.engine.outputs import GenerateOutput
from torch_dflash.engine.registry import cached_engine
from torch_dflash.engine.replicas import engine_of
from torch_dflash.processors.custom import HostProcessor
from torch_dflash.processors.interface import Processor
from torch_dflash.proposers.choose import Missing, check_models
from torch_dflash.requests.aliases import check_compiled_options
from torch_dflash.requests.options import OF_AN_ENGINE, EngineOptions, GenerateOptions
from torch_dflash.requests.read import check_compiled, read_call
from torch_dflash.requests.request import UNSET, Request
from torch_dflash.targets.weights import LoadedTarget, mesh_of


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
    drafter_quantize: str | None = None,
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
        quantize: "int8" keeps linear weights in 8 bits, a scale for each output row; a CPU quantises rows as
            they come, too. The text is the quantised model's. Unset: as `jax_bridge.load` was told.
        drafter_quantize: "int8" keeps the drafter's linear weights so, and the target's as they are: no text
            changes. A head that it shares with the target stays as it is. Unset: as ``quantize``.
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
    streamer: Any = None,
    return_dict_in_generate: Literal[True],
    **options: Unpack[GenerateOptions],
) -> GenerateOutput: ...
@overload
def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter: Any = Missing,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    streamer: Any = None,
    return_dict_in_generate: Literal[False] = False,
    **options: Unpack[GenerateOptions],
) -> torch.LongTensor: ...
@overload
def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter: Any = Missing,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    streamer: Any = None,
    return_dict_in_generate: bool,
    **options: Unpack[GenerateOptions],
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
            ``prefill_chunk_size``, ``matmul_precision``, ``compute``, ``quantize``, ``drafter_quantize``,
            ``mesh``, ``replicas`` and ``verify`` as in `compile`; ``grammar``, a `Grammar` that the new
            tokens keep to, or a list of one or None a row; ``response_format``, as OpenAI's API has it, with
            the ``tokenizer``; ``generation_config`` or any field of one. Other arguments of transformers' are
            taken where they ask for nothing: an empty cache or list, a tokenizer, the positions of the mask.

    Returns:
        LongTensor [B, T + new]: prompt, new tokens (stop id included), padding; or `GenerateOutput`.

    Raises:
        TypeError, ValueError: bad input, before any generation starts. RuntimeError: ``runtime="xla"`` in a
            process that was forked after JAX had started.
    """
    requested = options | {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "seed": seed,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "processors": processors,
        "runtime": runtime,
        "stopping_criteria": stopping_criteria,
        "return_dict_in_generate": return_dict_in_generate,
    }
    call = prepare("generate", target, drafter, input_ids, attention_mask, requested, streamer)
    output = call.engine().run(call.request, streamer)
    return output if return_dict_in_generate else output.sequences


@dataclass(frozen=True)
class PreparedCall:
    """A call that was read: its request, and the engine that it needs."""

    target: Any
    drafter: Any
    request: Request
    options: EngineOptions

    def engine(self) -> Engine:
        """The engine, made by this call or one before."""
        if any(isinstance(one, HostProcessor) for one in self.options.processors or ()):
            return engine_of(self.target, self.drafter, self.options)  # no other call has this one
        return cached_engine(self.target, self.drafter, self.options)


def prepare(
    what: str,
    target: Any,
    drafter: Any,
    input_ids: Any,
    attention_mask: Any,
    options: Mapping[str, Any],
    streamer: Any = None,
) -> PreparedCall:
    """Check all arguments of a call that makes its own engine.

    Args:
        what: the call, as other processes hear of it.
        target, drafter, input_ids, attention_mask, streamer: as in `generate`, and all of its ``options``.

    Raises:
        TypeError, ValueError: bad input. RuntimeError: other processes of the mesh make another call.
    """

    def read(*given: Any) -> PreparedCall:
        request, made = read_call(target, drafter, *given)
        check_streamer(streamer, len(request.rows))
        return PreparedCall(target, drafter, request, made)

    check_models(target, drafter)
    wanted, runtime, replicas = options.get("mesh"), options.get("runtime", "xla"), options.get("replicas", 1)
    check_mesh(wanted, runtime, replicas)
    mesh = mesh_of(target, wanted, replicas)
    if (hosts := hosts_of(runtime, mesh, replicas)) is None:
        return read(input_ids, attention_mask, options)

    def digest(call: PreparedCall) -> dict[str, str]:  # the mesh by its order, however it is named
        engine: Any = call.engine()
        return digest_of(call.request, replace(call.options, mesh=None)) | engine.bits()

    facts = facts_of(hosts, mesh, target, drafter)
    return read_broadcast(hosts, what, facts, (input_ids, attention_mask, options), read, digest)
