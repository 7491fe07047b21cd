"""A call read against the target alone: its rows without padding, and what each asks for."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from torch_dflash.checks import check_counts, check_target
from torch_dflash.plan import DecodePlan
from torch_dflash.processors.custom import HostProcessor
from torch_dflash.processors.interface import Processor
from torch_dflash.requests.arguments import set_aside_cache, take_arguments
from torch_dflash.requests.logprobs import check_logit_outputs
from torch_dflash.requests.prompts import check_ids, check_text_alone, split_rows
from torch_dflash.requests.request import Request, defaults_of, resolve
from torch_dflash.requests.row_values import seed_key
from torch_dflash.requests.rules import check_covered
from torch_dflash.requests.stopping import Criterion
from torch_dflash.rows import RowRequests
from torch_dflash.state import Sampling
from torch_dflash.targets.weights import model_of


def read_request(
    target: Any, input_ids: Tensor | None, attention_mask: Tensor | None, options: dict[str, Any]
) -> Request:
    """Validate a call: ragged rows of real tokens, and options resolved over the model's own.

    Raises:
        TypeError, ValueError: naming what cannot be honoured, before anything runs.
    """
    target = model_of(target)
    check_target(target)
    options = dict(options)
    config = defaults_of(target, options.pop("generation_config", None))
    position_ids = options.pop("position_ids", None)
    set_aside_cache(options)
    take_arguments(options, target)
    check_ids(input_ids)
    assert input_ids is not None
    given_pad = options.get("pad_token_id")
    embedding: Tensor = target.get_input_embeddings().weight  # pyright: ignore[reportAssignmentType]
    vocab_size = embedding.shape[0]
    request = resolve(config, input_ids.shape[0], input_ids.shape[1], options, vocab_size)
    # A pad that nobody named is a stop id. One that may end a row's text is no sign of padding in it.
    named = given_pad is not None or config.pad_token_id is not None
    pad = request.pad_token_id if named else None
    pads = [None if pad in stops else pad for stops in request.stop_ids]
    rows = split_rows(input_ids, attention_mask, vocab_size, pads, position_ids)
    check_text_alone(rows, target)
    return replace(request, rows=rows)


def repeated(target: Any, input_ids: Any, attention_mask: Any, options: dict[str, Any]) -> tuple[Any, Any]:
    """Prompts and mask, each row as often as ``num_return_sequences`` asks for, which is taken out.

    Raises:
        ValueError: no count; or more than one text of a greedy row, which would be the same.
    """
    model = model_of(target)
    check_target(model)
    config = defaults_of(model, options.get("generation_config"))
    given = options.pop("num_return_sequences", None)
    count = config.num_return_sequences if given is None else given
    check_counts(num_return_sequences=count)
    if count in (None, 1) or not isinstance(input_ids, Tensor) or input_ids.ndim != 2:
        return input_ids, attention_mask
    sampled = options.get("do_sample")
    if not (config.do_sample if sampled is None else sampled):
        raise ValueError(
            f"num_return_sequences={count}: a greedy text has no second; pass do_sample=True, or 1 of it."
        )

    def more(rows: Any) -> Any:
        batch = isinstance(rows, Tensor) and rows.ndim == 2
        return rows.repeat_interleave(count, dim=0) if batch else rows

    if "position_ids" in options:
        options["position_ids"] = more(options["position_ids"])
    return more(input_ids), more(attention_mask)


def row_requests(request: Request, plan: DecodePlan) -> RowRequests:
    """The rows' limits, stop ids and sampling as tensors of the plan's batch, with idle rows done."""
    idle, rows = RowRequests.idle(plan), len(request.rows)

    def column(values: list, unused: Tensor) -> Tensor:
        return torch.tensor([*values, *unused[rows:].tolist()], dtype=unused.dtype, device="cpu")

    stops = [[*ids, *[-1] * (plan.stop_slots - len(ids))] for ids in request.stop_ids]
    keys = [seed_key(seed) for seed in request.seed]  # here, where Python's integers do not overflow
    return RowRequests(
        limit=column(request.limits, idle.limit),
        stop_ids=column(stops, idle.stop_ids),
        done=column([False] * rows, idle.done),
        sampling=Sampling(
            temperature=column(request.temperature, idle.sampling.temperature),
            top_k=column(request.top_k, idle.sampling.top_k),
            top_p=column(request.top_p, idle.sampling.top_p),
            min_p=column(request.min_p, idle.sampling.min_p),
            seed=column([key - (key >> 31 << 32) for key in keys], idle.sampling.seed),
        ),
        rules=tuple(_values(processor, request, plan) for processor in plan.processors),
    )


def _values(processor: Processor, request: Request, plan: DecodePlan) -> Any:
    """What the request's rows, and the idle ones, ask of a processor that is compiled in."""
    of_kind = [asked for kind, asked in request.processors.items() if processor.covers(kind)]
    spare = plan.batch_size - len(request.rows)
    asked = of_kind[0] if of_kind else [None] * len(request.rows)
    return processor.values([*asked, *[None] * spare], [*request.lengths, *[0] * spare])


def check_fits(request: Request, plan: DecodePlan) -> None:
    """Raise ``ValueError`` unless an engine of ``plan`` can serve the request at once."""
    if len(request.rows) > plan.batch_size:
        raise ValueError(
            f"input_ids has {len(request.rows)} rows, the engine was compiled for batch_size="
            f"{plan.batch_size}; compile with a larger one."
        )
    check_each_fits(request, plan)


def check_each_fits(request: Request, plan: DecodePlan) -> None:
    """Raise ``ValueError`` unless an engine of ``plan`` can serve each row of the request."""
    for row, (length, limit) in enumerate(zip(request.lengths, request.limits, strict=True)):
        if limit > plan.capacity:
            raise ValueError(
                f"row {row}: a prompt of {length} tokens and max_new_tokens={limit - length} exceed "
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
    check_covered(request.processors, plan.processors)
    check_logit_outputs(request.logit_outputs, plan)


_log = logging.getLogger("torch_dflash")


def per_token(request: Request, processors: Iterable[Any], runtime: str) -> dict[str, Any]:
    """Options of an engine for a call whose processors or criteria have to see each token; {} for others.

    They get what transformers would hand them, once a token: prompts are read in one piece, and a round
    verifies one row. Nothing is drafted then, which is logged.

    Raises:
        ValueError: ``runtime`` has no host to ask.
    """
    asked = impure(processors) + [one.name for one in request.stopping if isinstance(one, Criterion)]
    if not asked:
        return {}
    if runtime != "eager":
        raise ValueError(
            f"{asked[0]} runs on the host after each token: pass runtime='eager', or say it by options "
            "(stop_strings, eos_token_id) or a td.BlockProcessor."
        )
    _log.info("%s sees one token at a time: plain decoding, nothing is drafted", asked[0])
    return {"verify_width": 1, "rounds_per_chunk": 1}


def check_compiled(processors: Iterable[Any] | None) -> None:
    """Raise ``ValueError`` for a processor that an engine of many calls could not ask as it must be."""
    for name in impure(processors or ()):
        raise ValueError(
            f"processors holds {name}, which has to be asked once for each token of one call: pass it to "
            "torch_dflash.generate, or td.HostProcessor(..., pure=True) if its scores follow from its "
            "arguments."
        )


def impure(processors: Iterable[Any]) -> list[str]:
    """The names of those that have to be asked once for each token, and of a prompt read in one piece."""
    return [one.name for one in processors if isinstance(one, HostProcessor) and not one.pure]
