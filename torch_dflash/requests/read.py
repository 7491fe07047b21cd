"""Reads a call: its options are split once, by who reads them, and its prompts become rows."""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from types import SimpleNamespace
from typing import Any

from torch import Tensor
from transformers import GenerationConfig

from torch_dflash.checks import (
    check_blocks,
    check_counts,
    check_loaded,
    check_runtime,
    check_target,
    context_of,
    one_per_row,
    row_list,
)
from torch_dflash.grammars.grammar import Grammar
from torch_dflash.plan import DecodePlan
from torch_dflash.processors.custom import HostProcessor
from torch_dflash.processors.options import Batch, check_suppressed
from torch_dflash.requests.arguments import COMPILED, check_argument, is_cache
from torch_dflash.requests.logprobs import OF_LOGITS, check_logit_outputs, read_logit_outputs
from torch_dflash.requests.options import OF_A_CALL, EngineOptions, round_up
from torch_dflash.requests.prompts import check_ids, check_text_only, split_rows
from torch_dflash.requests.refusals import config_fields, refuse_doubled_cache, refuse_unsupported
from torch_dflash.requests.request import SAMPLING, UNSET, Request, Row
from torch_dflash.requests.row_values import check_pad, row_seeds, stop_ids
from torch_dflash.requests.rules import (
    KINDS,
    arranged,
    check_covered,
    check_processors,
    options_of_rules,
    requested_processors,
)
from torch_dflash.requests.stopping import Criterion, read_criteria, stop_rules_of
from torch_dflash.runtime_kinds import RUNTIMES
from torch_dflash.targets.weights import model_of

_log = logging.getLogger("torch_dflash")


@dataclass(frozen=True)
class Own:
    """Options that no ``GenerationConfig`` has, and stop ids, of which it takes none a row. None: unset."""

    seed: Any = None
    tokenizer: Any = None
    eos_token_id: Any = UNSET
    response_format: Any = None
    output_logprobs: Any = None
    top_logprobs: Any = None
    position_ids: Any = None
    processors: Any = None
    stopping_criteria: Any = None
    rules: Mapping[str, Any] = field(default_factory=dict)
    """Every option of rules that transformers does not have, whatever a config's field of its name holds."""


OWN = tuple(option.name for option in fields(Own) if option.name != "rules")
_OF_ONE_CALL = ("processors", "stopping_criteria")
"""Those that an engine, which serves many calls, does not take."""


@dataclass(frozen=True)
class CallOptions:
    """A call's options by who reads them: the engine, transformers' config, and the rest of this library.

    ``config`` is the model's under the call's; ``given`` are the fields that the call names itself; ``rows``
    those of them that are per row, which a config does not hold.
    """

    engine: Mapping[str, Any]
    config: GenerationConfig
    given: Mapping[str, Any]
    rows: Mapping[str, Any]
    own: Own

    def value(self, name: str) -> Any:
        """The value of an option of `SAMPLING` or of rules, one or one a row; None: unset."""
        if name in self.own.rules:
            return self.own.rules[name]
        return self.rows.get(name, getattr(self.config, name, None))


def read_options(target: Any, options: Mapping[str, Any], makes_engine: bool = False) -> CallOptions:
    """Split ``options``; every name is ours, a config's, ignored because it asks for nothing, or refused.

    Args:
        target: the model.
        options: as the user gives them; not modified.
        makes_engine: whether the call makes its own engine, and so takes an engine's options.

    Raises:
        TypeError: a name that nobody knows, or one of `torch_dflash.compile`. ValueError: a value that cannot
            be honoured; the message says what to do.
    """
    own_names = [name for name in OWN if makes_engine or name not in _OF_ONE_CALL]
    known, rules = config_fields(), options_of_rules()
    engine, given, own, base = {}, {}, {}, None
    own_rules: dict[str, Any] = {name: None for name, option in rules.items() if option.ours}
    check_loaded("tokenizer", options.get("tokenizer"), "AutoTokenizer.from_pretrained({})")
    for name, value in options.items():
        if name == "cache" and is_cache(value):
            check_argument("past_key_values", value, target)
        elif makes_engine and name in OF_A_CALL:
            engine[name] = value
        elif name in own_names:
            own[name] = value
        elif name in own_rules:
            own_rules[name] = value
        elif name == "generation_config":
            base = value
        elif name in known and name not in COMPILED:
            given[name] = value
        else:
            check_argument(name, value, target)
    _check_given(given)
    config = _defaults_of(target, base)
    per_row = {*SAMPLING, *(name for name, option in rules.items() if option.per_row)}
    each = [
        name
        for name in given
        if name == "max_new_tokens" or name in per_row and isinstance(row_list(given[name]), list)
    ]
    kept = (*each, "num_return_sequences")  # which transformers would refuse by a message without a fix
    config.update(**{name: value for name, value in given.items() if value is not None and name not in kept})
    config.update(defaults_only=True, **config._get_default_generation_params())
    refuse_unsupported(config)
    return CallOptions(
        engine, config, given, {name: given[name] for name in each}, Own(**own, rules=own_rules)
    )


def _check_given(given: dict[str, Any]) -> None:
    """Before transformers sees them: its messages name no fix."""
    if not isinstance(given.get("do_sample"), bool | None):
        raise ValueError(f"do_sample={given['do_sample']!r}: must be True, False or None (unset).")
    refuse_doubled_cache(given)
    check_pad(given.get("pad_token_id"))
    check_suppressed(given.get("suppress_tokens"))
    refuse_unsupported(SimpleNamespace(**given))


def _defaults_of(target: Any, given: GenerationConfig | None) -> GenerationConfig:
    """A copy of the model's ``generation_config``, or of a user's, filled up from the model's."""
    if given is None:
        return copy.deepcopy(target.generation_config)
    if not isinstance(given, GenerationConfig):
        raise TypeError(
            f"generation_config={type(given).__name__}: pass a transformers GenerationConfig, or its options."
        )
    merged = copy.deepcopy(given)
    merged.update(defaults_only=True, **target.generation_config.to_dict())
    return merged


def read_request(
    target: Any,
    input_ids: Any,
    attention_mask: Any,
    options: Mapping[str, Any] | CallOptions,
) -> Request:
    """Validate a call: ragged rows of real tokens, and options merged over the model's own.

    Raises:
        TypeError, ValueError: naming what cannot be honoured, before anything runs.
    """
    target = model_of(target)
    check_target(target)
    call = options if isinstance(options, CallOptions) else read_options(target, options)
    config, own = call.config, call.own
    input_ids, attention_mask, position_ids = _repeated(call, input_ids, attention_mask)
    rows, width = input_ids.shape
    vocab_size = target.get_input_embeddings().weight.shape[0]
    logprobs = read_logit_outputs(config, {name: getattr(own, name) for name in OF_LOGITS}, vocab_size)
    sampling = _sampling(call, rows)
    stops = stop_ids(config.eos_token_id if own.eos_token_id is UNSET else own.eos_token_id, rows)
    first_stop = next((int(ids[0]) for ids in stops if ids), 0)
    pad = check_pad(config.pad_token_id)
    budgets = _budgets(call, rows, width)
    wanted = {name: call.value(name) for name in KINDS} | {"grammar": _grammars(own, rows)}
    requested = requested_processors(wanted, Batch(width, budgets, stops, bool(config.do_sample), vocab_size))
    seeds = row_seeds(own.seed, rows)
    # A pad that nobody named is a stop id. One that may end a row's text is no sign of padding in it.
    pads = [None if pad in ids else pad for ids in stops]
    prompts = split_rows(input_ids, attention_mask, vocab_size, pads, position_ids)
    check_text_only(prompts, target)
    pad = first_stop if pad is None else pad
    stopping = stop_rules_of(config, own.tokenizer)
    lengths, criteria = [len(prompt) for prompt in prompts], own.stopping_criteria or ()
    stopping += read_criteria(criteria, input_ids, lengths, pad, logprobs.normalised)
    found = [
        Row(
            prompt,
            budgets[row],
            **{name: values[row] for name, values in sampling.items()},
            seed=seeds[row],
            stop_ids=stops[row],
            rules={kind: values[row] for kind, values in requested.items() if values[row] is not None},
            stopping=tuple(stopping),
            logprobs=logprobs,
        )
        for row, prompt in enumerate(prompts)
    ]
    return Request(found, pad, input_ids)


def _repeated(call: CallOptions, input_ids: Any, attention_mask: Any) -> tuple[Tensor, Any, Any]:
    """Prompts, mask and positions, each row as often as ``num_return_sequences`` asks for.

    Raises:
        ValueError: no count; or more than one text of a greedy row, which would be the same.
    """
    count, positions = call.given.get("num_return_sequences"), call.own.position_ids
    count = call.config.num_return_sequences if count is None else count
    check_counts(num_return_sequences=count)
    check_ids(input_ids)
    if count in (None, 1):
        return input_ids, attention_mask, positions
    if not call.config.do_sample:
        raise ValueError(
            f"num_return_sequences={count}: a greedy text has no second; pass do_sample=True, or 1 of it."
        )

    def more(rows: Any) -> Any:
        batch = isinstance(rows, Tensor) and rows.ndim == 2
        return rows.repeat_interleave(count, dim=0) if batch else rows

    return more(input_ids), more(attention_mask), more(positions)


def _sampling(call: CallOptions, rows: int) -> dict[str, list]:
    """The values of `SAMPLING` for each row."""
    sampled, given = bool(call.config.do_sample), call.given
    found = {}
    for name, option in SAMPLING.items():
        value = call.value(name)
        found[name] = one_per_row(name, option.off if value is None else value, rows)
        if name == "temperature" and given.get(name) is not None and not sampled:
            if any(found[name]) and given.get("do_sample") is None:
                raise ValueError(
                    f"temperature={found[name]} while do_sample is unset and the model's default is greedy; "
                    "pass do_sample=True to sample."
                )
        for one in found[name]:
            option.check(one)
    return found if sampled else found | {"temperature": [0.0] * rows}


def _grammars(own: Own, rows: int) -> Any:
    """``grammar``, or those that ``response_format`` stands for, one a row.

    Raises:
        ValueError: both are given, or a format that is none or lacks its ``tokenizer``.
    """
    grammar = own.rules.get("grammar")
    if own.response_format is None:
        return grammar
    if grammar is not None:
        raise ValueError("grammar and response_format both say what an answer may be; pass one of them.")
    made: dict[int, Grammar | None] = {}
    each = one_per_row("response_format", own.response_format, rows)
    for one in each:
        if id(one) not in made:
            made[id(one)] = None if one is None else Grammar.of_response_format(one, own.tokenizer)
    return [made[id(one)] for one in each]


def _budgets(call: CallOptions, rows: int, width: int) -> list[int]:
    config, budget = call.config, call.rows.get("max_new_tokens")
    budget = config.max_new_tokens if budget is None else budget
    if budget is None:
        untouched = config.max_length == config._get_default_generation_params()["max_length"]
        # transformers' default: 20 tokens beyond the prompt
        plain = untouched and call.given.get("max_length") is None
        budget = config.max_length if plain else new_tokens_below(config.max_length, width)
    budgets = one_per_row("max_new_tokens", budget, rows)
    for value in budgets:
        check_counts(max_new_tokens=value)
    return budgets


def new_tokens_below(max_length: Any, width: int) -> int:
    """The new tokens that ``max_length`` leaves after ``width`` columns of prompt; ``ValueError`` if none."""
    check_counts(max_length=max_length)
    if max_length <= width:
        raise ValueError(
            f"max_length={max_length} leaves no room after the prompt's {width} columns; pass "
            f"max_new_tokens, or a max_length of at least {width + 1}."
        )
    return max_length - width


def read_call(
    target: Any, drafter: Any, input_ids: Any, attention_mask: Any, options: Mapping[str, Any]
) -> tuple[Request, EngineOptions]:
    """A call that makes its own engine: its request, and the engine that serves it.

    Raises:
        TypeError, ValueError: naming what cannot be honoured, before anything runs.
    """
    model = model_of(target)
    check_target(model)
    call = read_options(model, options, makes_engine=True)
    check_processors(call.own.processors)
    request = read_request(model, input_ids, attention_mask, call)
    own = [
        replace(one, prompts=request.input_ids) if isinstance(one, HostProcessor) and not one.pure else one
        for one in call.own.processors or ()
    ]
    runtime, replicas = call.engine.get("runtime", "xla"), call.engine.get("replicas", 1)
    check_runtime(runtime)
    alone, compiles = _per_token(request, own, runtime), RUNTIMES[runtime].compiles
    check_blocks(drafter, **{name: call.engine.get(name) for name in ("block_size", "verify_width")})
    rows = -(-len(request.rows) // replicas)  # of each replica
    made = {
        "max_length": _capacity(request, model),
        # A program a batch size: round up. Where nothing compiles, idle rows would only cost time.
        "batch_size": 1 << (rows - 1).bit_length() if compiles else rows,
        "stop_slots": max(8, *(len(row.stop_ids) for row in request.rows)),
        "filters": any(row.filters for row in request.rows),
        "processors": arranged([*request.processors, *own]),
        "outputs": request.logprobs.outputs,
        "top_logprobs": request.logprobs.top_logprobs,
    }
    return request, EngineOptions(**(made | dict(call.engine) | alone))


def _capacity(request: Request, target: Any) -> int:
    """The room of an engine that holds the longest row, or ``ValueError`` where the target has none."""
    longest = max(request.rows, key=lambda row: row.limit)
    context = context_of(target)
    if longest.limit > context:
        at = next(number for number, row in enumerate(request.rows) if row is longest)
        raise ValueError(
            f"row {at}: a prompt of {longest.length} tokens and max_new_tokens={longest.max_new_tokens} "
            f"exceed the target's max_position_embeddings={context}; shorten them."
        )
    return round_up(longest.limit, context)


def _per_token(request: Request, processors: Iterable[Any], runtime: str) -> dict[str, Any]:
    """Options of an engine for a call whose processors or criteria have to see each token; {} for others.

    They get what transformers would hand them, once a token: prompts are read in one piece, and a round
    verifies one row. Nothing is drafted then, which is logged.

    Raises:
        ValueError: ``runtime`` has no host to ask.
    """
    stopping = dict.fromkeys(rule for row in request.rows for rule in row.stopping)
    host_rules = impure(processors) + [one.name for one in stopping if isinstance(one, Criterion)]
    if not host_rules:
        return {}
    if not RUNTIMES[runtime].asks_host:
        raise ValueError(
            f"{host_rules[0]} runs on the host after each token: pass runtime='eager', or say it by options "
            "(stop_strings, eos_token_id) or a td.BlockProcessor."
        )
    _log.info("%s sees one token at a time: plain decoding, nothing is drafted", host_rules[0])
    return {"verify_width": 1, "rounds_per_chunk": 1}


def impure(processors: Iterable[Any]) -> list[str]:
    """The names of those that have to be asked once for each token, and of a prompt read in one piece."""
    return [one.name for one in processors if isinstance(one, HostProcessor) and not one.pure]


def check_compiled(processors: Iterable[Any] | None) -> None:
    """Raise ``ValueError`` for a processor that an engine of many calls could not ask as it must be."""
    for name in impure(processors or ()):
        raise ValueError(
            f"processors holds {name}, which has to be asked once for each token of one call: pass it to "
            "torch_dflash.generate, or td.HostProcessor(..., pure=True) if its scores follow from its "
            "arguments."
        )


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
    for number, row in enumerate(request.rows):
        if row.limit > plan.capacity:
            raise ValueError(
                f"row {number}: a prompt of {row.length} tokens and max_new_tokens={row.max_new_tokens} "
                f"exceed max_length={plan.capacity}; shorten them or compile with a larger max_length."
            )
    most = max(len(row.stop_ids) for row in request.rows)
    if most > plan.stop_slots:
        raise ValueError(
            f"eos_token_id has {most} ids, the engine stop_slots={plan.stop_slots}; compile with more."
        )
    if any(row.filters for row in request.rows) and not plan.filters:
        raise ValueError(
            "top_k, top_p or min_p was asked for (top_k=50 is transformers' default when sampling), but "
            "the engine was compiled with filters=False; compile with filters=True or pass top_k=0."
        )
    check_covered(request.processors, plan.processors)
    check_logit_outputs(request.logprobs, plan)
