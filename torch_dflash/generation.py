"""The front doors: `generate`, `compile`, and `dflash` for transformers' ``custom_generate``."""

from __future__ import annotations

from typing import Any, cast

import torch
from torch import Tensor
from transformers import GenerationConfig, PreTrainedModel

from torch_dflash.arguments import COMPILED
from torch_dflash.calls import read_request
from torch_dflash.capacity import round_up
from torch_dflash.checkpoints import check_drafter
from torch_dflash.checks import (
    check_blocks,
    check_cache,
    check_counts,
    check_runtime,
    check_streamer,
    context_of,
)
from torch_dflash.engine import Engine
from torch_dflash.engine_cache import cached_engine
from torch_dflash.loaded import LoadedTarget, model_of
from torch_dflash.options import UNSET, room_below
from torch_dflash.outputs import GenerateOutput
from torch_dflash.prepared import read_criteria, read_processors
from torch_dflash.refusals import refuse_unsupported
from torch_dflash.seeds import drawn_seed
from torch_dflash.special_ids import stop_ids
from torch_dflash.streaming import streamer_of_caller


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
    unknown = [name for name in options if name not in COMPILED | {"max_length"}]
    if unknown:
        raise TypeError(
            f"compile() does not know {unknown[0]!r}: it takes max_length, {', '.join(sorted(COMPILED))}; "
            "options of generation go to the engine's generate."
        )
    check_blocks(drafter, **{name: options.get(name) for name in ("block_size", "verify_width")})
    engine = Engine(target, drafter, **options)
    engine.keeps_alive = (target, drafter)
    return engine


def generate(
    target: PreTrainedModel | LoadedTarget,
    drafter,
    input_ids: Tensor | None = None,
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

    Honoured: lengths, stop ids, temperature, top-k, top-p, min-p. Refused by name: all else that changes it.

    Args:
        target: a transformers causal LM, or what `jax_bridge.load` gave.
        drafter: a `DFlashDraftModel`, another proposer, or None for plain autoregressive decoding.
        input_ids: LongTensor [B, T], padded on either side.
        attention_mask: [B, T], 1 = real token.
        max_new_tokens: hard cap. temperature: 0 is greedy. streamer: transformers', for one row.
        seed: in [-2**63, 2**64); row b of a batch uses ``seed + b``; unset: drawn from torch's generator.
        eos_token_id: unset: the model's; None or []: never stop.
        pad_token_id: fills rows that ended early; unset: the model's, else its first stop id.
        block_size, verify_width, rounds_per_chunk, runtime, cache, verify: see `compile`.
        return_dict_in_generate: return ``.sequences`` and ``.stats``.
        **options: ``generation_config`` or any field of one. Other arguments of transformers' are taken where
            they ask for nothing: an empty cache or list, a tokenizer, the positions of the mask.

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
    call = {"streamer": streamer, "return_dict_in_generate": return_dict_in_generate}
    return engine.generate(cast(Tensor, input_ids), attention_mask, **call, **options)


class dflash:  # noqa: N801 - reads as the keyword it is passed for
    """Block decoding for ``target.generate(..., custom_generate=dflash(drafter))``.

    A ``streamer`` may be given to ``target.generate``, to a pipeline's call, or bound here. A ``tokenizer``
    is dropped by transformers on its way to a custom generate.

    ``MaxLengthCriteria``, ``EosTokenCriteria`` and the warpers of temperature, top-k, top-p and min-p are
    honoured as transformers lists them; other processors and criteria are refused by name.

    Args:
        drafter: as in `generate`. **bound: ``runtime``, ``block_size``, ``verify_width``,
            ``rounds_per_chunk``, ``cache``, ``verify``, ``seed``, ``streamer``; a call's own seed or streamer
            goes first.

    Raises:
        TypeError: another keyword; ``target.generate`` itself takes the options of generation. ValueError:
            a bound value that no call could honour.
    """

    def __init__(self, drafter, *called: Any, **bound: Any):
        if called:  # as transformers calls what it is given
            raise TypeError("custom_generate=dflash: pass what it makes, dflash(drafter).")
        unknown = [name for name in bound if name not in _BOUND]
        if unknown:
            raise TypeError(
                f"dflash() takes {', '.join(_BOUND)}, not {unknown[0]!r}; pass it to target.generate."
            )
        check_drafter(drafter)
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
        config, width = generation_config or model.generation_config, input_ids.shape[1]
        # transformers has repeated the rows already, and makes such a min_length of min_new_tokens=0.
        done = ("num_return_sequences", *(["min_length"] if (config.min_length or 0) <= width else []))
        refuse_unsupported(config, already_done=done)
        if model_kwargs.get("attention_mask") is None:
            model_kwargs["attention_mask"] = torch.ones_like(input_ids)  # None stands for "all real"
        call = {"seed": seed, "streamer": streamer_of_caller(model)}
        bound = self.bound | {name: value for name, value in call.items() if value is not None}
        return generate(
            model,
            self.drafter,
            input_ids,
            return_dict_in_generate=bool(config.return_dict_in_generate),
            generation_config=config,  # else the model's own would fill in what the user has overridden
            num_return_sequences=1,
            min_length=0,
            **_asked(config, logits_processor, stopping_criteria, input_ids),
            **(model_kwargs | bound),
        )


_BOUND = ("runtime", "block_size", "verify_width", "rounds_per_chunk", "cache", "verify", "seed", "streamer")


def _asked(config: GenerationConfig, processors: Any, criteria: Any, input_ids: Tensor) -> dict[str, Any]:
    """The options that transformers' prepared lists stand for; without lists, the config's own."""
    rows, width = input_ids.shape
    names = ("temperature", "top_k", "top_p", "min_p")
    if processors is None:
        sampling = {name: getattr(config, name) for name in names}
    else:
        sampling = read_processors(processors, width)
    lengths, stops = read_criteria(criteria or ())
    pad = config.pad_token_id
    if pad is None and config.eos_token_id is not None:  # as transformers, whatever a criterion adds
        pad = next((int(ids[0]) for ids in stop_ids(config.eos_token_id, rows) if ids), None)
    return {
        "max_new_tokens": min(room_below(length, width) for length in lengths or [config.max_length]),
        "eos_token_id": config.eos_token_id if stops is None else stops,
        "pad_token_id": pad,
        # To transformers an unset do_sample is greedy by now, whatever the sampling options say.
        "do_sample": config.do_sample or False,
    } | (sampling if config.do_sample else {})


def _capacity(ends: list[int], budgets: list[int], target: PreTrainedModel) -> int:
    """The room of an engine that holds the longest row, or ``ValueError`` where the target has none."""
    needed = max(ends)
    context = context_of(target)
    if needed > context:
        row = ends.index(needed)
        raise ValueError(
            f"row {row}: a prompt of {needed - budgets[row]} tokens and max_new_tokens={budgets[row]} exceed "
            f"the target's max_position_embeddings={context}; shorten them."
        )
    return round_up(needed, context)
