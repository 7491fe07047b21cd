"""The front doors: `generate`, `compile`, and `dflash` for transformers' ``custom_generate``."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from torch_dflash.checks import (
    check_blocks,
    check_cache,
    check_counts,
    check_runtime,
    check_streamer,
    context_of,
)
from torch_dflash.engine import Engine, read_request
from torch_dflash.engine_cache import cached_engine
from torch_dflash.loaded import LoadedTarget, model_of
from torch_dflash.options import UNSET, drawn_seed, refuse_unsupported, room_below
from torch_dflash.outputs import GenerateOutput


def compile(target: PreTrainedModel | LoadedTarget, drafter, **options: Any) -> Engine:
    """A reusable engine for ``target`` and ``drafter``. It keeps both alive.

    Args:
        target: a transformers causal LM, which stays untouched and usable, or what `jax_bridge.load` gave.
        drafter: a `DFlashDraftModel`, another proposer (`NGramProposer`), or None for plain decoding.
        runtime: "xla" (one compiled program on JAX's default device) or "eager" (PyTorch, on the models').
        max_length: most positions a row may fill, prompt and new tokens.
        batch_size: rows; a request with fewer is padded.
        block_size: drafted block, the anchor included; unset: the trained one.
        verify_width: how much of the block is verified, the anchor included; unset: all of it.
        rounds_per_chunk: rounds between host reads; unset: 16 for "xla", 1 for "eager".
        stop_slots: most stop ids a row may have.
        filters: compile top-k, top-p and min-p in.
        prefill_chunk_size: largest piece of a prompt, a power of two.
        matmul_precision: XLA matmul precision; "highest" keeps fp32 exact on TPU and GPU.
        cache: the target's: "static" (dense) or "paged", whose rows share pages as they grow.
        page_size: positions in a page, a multiple of 16.
        pool_pages: pages in all; unset: as many as a dense cache takes. With fewer, rows may have to wait for
            others to end; what they say does not change.
        verify: try a tiny random twin first where the target's class is not among those tested.

    Raises:
        TypeError, ValueError: something does not fit; the message names the field, the value and the fix.
    """
    check_blocks(drafter, **{name: options.get(name) for name in ("block_size", "verify_width")})
    engine = Engine(target, drafter, **options)
    engine.keeps_alive = (target, drafter)
    return engine


def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter,
    input_ids: Tensor,
    attention_mask: Tensor | None = None,
    *,
    max_new_tokens: int | list[int] | None = None,
    do_sample: bool | None = None,
    temperature: float | list[float] | None = None,
    seed: int | list[int] | None = None,
    eos_token_id: Any = UNSET,
    pad_token_id: int | None = None,
    block_size: int | None = None,
    verify_width: int | None = None,
    rounds_per_chunk: int | None = None,
    runtime: str = "xla",
    cache: str = "static",
    verify: bool = True,
    return_dict_in_generate: bool = False,
    streamer=None,
    **options: Any,
) -> torch.LongTensor | GenerateOutput:
    """Generate exactly the target's own tokens, drafted in blocks.

    Options left unset come from ``target.generation_config``, as in transformers' ``generate``. Those that
    may differ per row (``max_new_tokens``, ``temperature``, ``top_k``, ``top_p``, ``min_p``, ``seed``,
    ``eos_token_id`` as a list of lists) take one value or one per row.

    Args:
        target: a transformers causal LM, or what `jax_bridge.load` gave.
        drafter: a `DFlashDraftModel`, another proposer, or None for plain autoregressive decoding.
        input_ids: LongTensor [B, T], padded on either side.
        attention_mask: [B, T], 1 = real token.
        max_new_tokens: hard cap. temperature: 0 is greedy.
        seed: in [-2**63, 2**64); row b of a batch uses ``seed + b``; unset: drawn from torch's generator.
        eos_token_id: unset: the model's; None or []: never stop.
        pad_token_id: fills rows that ended early; unset: the model's, else its first stop id.
        block_size, verify_width, rounds_per_chunk, runtime, cache, verify: see `compile`.
        return_dict_in_generate: return ``.sequences`` and ``.stats``. streamer: transformers', for one row.
        **options: ``generation_config`` or any field of one, as in transformers.

    Returns:
        LongTensor [B, T + new]: prompt, new tokens (stop id included), padding; or `GenerateOutput`.

    Raises:
        TypeError, ValueError: bad input, before any generation starts.
    """
    options |= {
        "max_new_tokens": max_new_tokens,
        "do_sample": do_sample,
        "temperature": temperature,
        "seed": drawn_seed() if seed is None else seed,  # once: the request is read twice
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
    }
    rows, request = read_request(target, input_ids, attention_mask, options)
    check_streamer(streamer, len(rows))
    check_blocks(drafter, block_size=block_size, verify_width=verify_width)
    ends = [len(row) + new for row, new in zip(rows, request.max_new_tokens, strict=True)]
    engine = cached_engine(
        target,
        drafter,
        runtime=runtime,
        max_length=_capacity(ends, request.max_new_tokens, model_of(target)),
        # XLA compiles per batch size: round up. Eagerly, idle rows would only cost time.
        batch_size=len(rows) if runtime == "eager" else 1 << (len(rows) - 1).bit_length(),
        block_size=block_size,
        verify_width=verify_width,
        rounds_per_chunk=rounds_per_chunk,
        stop_slots=max(8, *map(len, request.stop_ids)),
        filters=request.filters,
        cache=cache,
        verify=verify,
    )
    return engine.generate(
        input_ids,
        attention_mask,
        streamer=streamer,
        return_dict_in_generate=return_dict_in_generate,
        **options,
    )


class dflash:  # noqa: N801 - reads as the keyword it is passed for
    """Block decoding for ``target.generate(..., custom_generate=dflash(drafter))``.

    transformers drops ``streamer`` on its way to a custom generate: pass it here.

    Args:
        drafter: as in `generate`. **bound: ``runtime``, ``block_size``, ``verify_width``,
            ``rounds_per_chunk``, ``cache``, ``verify``, ``seed``, ``streamer``.

    Raises:
        TypeError: another keyword; ``target.generate`` itself takes the options of generation. ValueError:
            a bound value that no call could honour.
    """

    def __init__(self, drafter, **bound: Any):
        unknown = [name for name in bound if name not in _BOUND]
        if unknown:
            raise TypeError(
                f"dflash() takes {', '.join(_BOUND)}, not {unknown[0]!r}; pass it to target.generate."
            )
        block_size, verify_width = bound.get("block_size"), bound.get("verify_width")
        check_runtime(bound.get("runtime", "xla"))
        check_cache(bound.get("cache", "static"))
        check_counts(
            block_size=block_size, verify_width=verify_width, rounds_per_chunk=bound.get("rounds_per_chunk")
        )
        check_blocks(drafter, block_size=block_size, verify_width=verify_width)
        self.drafter = drafter
        self.bound = bound

    def __call__(
        self,
        model: PreTrainedModel,
        input_ids: Tensor,
        logits_processor=None,
        stopping_criteria=None,
        generation_config: GenerationConfig | None = None,
        seed: int | list[int] | None = None,
        **model_kwargs: Any,
    ) -> torch.LongTensor | GenerateOutput:
        """transformers' contract: prepared ids and a resolved ``generation_config``.

        ``seed`` may be given to ``target.generate`` itself; the mask comes in ``model_kwargs``.
        """
        config = generation_config or model.generation_config
        refuse_unsupported(config, already_done=("num_return_sequences",))
        _refuse_inputs(model_kwargs)
        _refuse_classes("logits_processor", logits_processor, _PROCESSORS)
        _refuse_classes("stopping_criteria", stopping_criteria, _CRITERIA)
        attention_mask = model_kwargs.get("attention_mask")
        if attention_mask is None:
            attention_mask = torch.ones_like(input_ids)  # transformers passes None for "all real"
        # To transformers an unset do_sample is greedy by now, whatever the sampling options say.
        names = ("temperature", "top_k", "top_p", "min_p") if config.do_sample else ()
        options: dict[str, Any] = {"seed": seed, "pad_token_id": config.pad_token_id}
        options |= {"do_sample": config.do_sample or False} | {name: getattr(config, name) for name in names}
        return generate(
            model,
            self.drafter,
            input_ids,
            attention_mask,
            max_new_tokens=room_below(config.max_length, input_ids.shape[1]),
            eos_token_id=config.eos_token_id,
            return_dict_in_generate=bool(config.return_dict_in_generate),
            generation_config=config,  # else the model's own would fill in what the user has overridden
            num_return_sequences=1,  # transformers has repeated the rows already
            **(options | self.bound),
        )


_BOUND = ("runtime", "block_size", "verify_width", "rounds_per_chunk", "cache", "verify", "seed", "streamer")
# What transformers prepares for any decoder; our own state takes its place.
_PREPARED = ("attention_mask", "position_ids", "past_key_values", "logits_to_keep", "use_cache")
# What transformers builds from options that a round honours itself.
_PROCESSORS = ("TemperatureLogitsWarper", "TopKLogitsWarper", "TopPLogitsWarper", "MinPLogitsWarper")
_CRITERIA = ("MaxLengthCriteria", "EosTokenCriteria")


def _refuse_inputs(model_kwargs: dict[str, Any]) -> None:
    for name, value in model_kwargs.items():
        if value is not None and name not in _PREPARED:
            raise ValueError(f"{name} is not supported in block decoding; pass input_ids alone.")
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise ValueError(
            f"past_key_values holds {cache.get_seq_length()} tokens: block decoding keeps its own cache; "
            "pass the whole input_ids without it."
        )


def _refuse_classes(argument: str, objects, known: tuple[str, ...]) -> None:
    for item in objects or ():
        if type(item).__name__ not in known:
            raise ValueError(
                f"{argument} holds {type(item).__name__}, which is written for one token at a time; block "
                f"decoding honours {', '.join(known)}: remove it."
            )


def _capacity(ends: list[int], budgets: list[int], target: PreTrainedModel) -> int:
    """The longest row's end, rounded up to one of four sizes per octave: few programs serve all lengths."""
    needed = max(ends)
    context = context_of(target)
    if needed > context:
        row = ends.index(needed)
        raise ValueError(
            f"row {row}: a prompt of {needed - budgets[row]} tokens and max_new_tokens={budgets[row]} exceed "
            f"the target's max_position_embeddings={context}; shorten them."
        )
    step = max(64, (1 << (needed - 1).bit_length()) // 8)
    rounded = -(-needed // step) * step
    return min(rounded, context)
