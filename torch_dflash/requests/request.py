"""From a user's call and the model's ``generation_config`` to what each row asks for."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from numbers import Real
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from transformers import GenerationConfig

from torch_dflash.checks import INT32_MAX, check_counts, check_rows, is_count, row_list
from torch_dflash.requests.grammars import RESPONSE_FORMAT, RowGrammar, grammars_of, read_format
from torch_dflash.requests.logprobs import OF_LOGITS, LogitOutputs, read_logit_outputs
from torch_dflash.requests.refusals import refuse_doubled_cache, refuse_unsupported
from torch_dflash.requests.row_values import check_pad, row_seeds, stop_ids
from torch_dflash.requests.rule_values import check_suppressed
from torch_dflash.requests.rules import KINDS, OURS, PER_ROW, Batch, RowRules, asked_processors
from torch_dflash.requests.stopping import StopRule, stop_rules_of

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()
FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Request:
    """What a batch asks for, one entry per row. ``temperature`` 0 means greedy, ``top_k`` 0 no top-k.

    ``rows`` are the prompts, int32, without padding.
    """

    max_new_tokens: list[int]
    temperature: list[float | int]
    top_k: list[int]
    top_p: list[float | int]
    min_p: list[float | int]
    seed: list[int]
    stop_ids: list[tuple[int, ...]]
    pad_token_id: int
    processors: RowRules = field(default_factory=dict)
    stopping: list[StopRule] = field(default_factory=list)
    logit_outputs: LogitOutputs = LogitOutputs()
    rows: list[np.ndarray] = field(default_factory=list)

    @classmethod
    def greedy(cls, rows: list[np.ndarray], max_new_tokens: int) -> Request:
        """The likeliest continuation of each row, to its full length."""
        each = {"temperature": 0, "top_k": 0, "top_p": 1, "min_p": 0, "seed": 0, "stop_ids": ()}
        asked: dict[str, Any] = {name: [value] * len(rows) for name, value in each.items()}
        return cls([max_new_tokens] * len(rows), **asked, pad_token_id=0, rows=rows)

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [len(row) for row in self.rows]

    @property
    def limits(self) -> list[int]:
        """Most positions that each row may fill."""
        return [a + b for a, b in zip(self.lengths, self.max_new_tokens, strict=True)]

    @property
    def grammars(self) -> list[RowGrammar | None]:
        """Each row's own, which lives as long as this request."""
        return grammars_of(self.processors, len(self.max_new_tokens))

    def part(self, rows: Sequence[int]) -> Request:
        """What some of the rows ask for, each as it would among all: its seed is its own."""
        named = ("max_new_tokens", "temperature", "top_k", "top_p", "min_p", "seed", "stop_ids", "rows")
        own = {name: [getattr(self, name)[row] for row in rows] for name in named}
        asked = {kind: [values[row] for row in rows] for kind, values in self.processors.items()}
        return replace(self, processors=asked, **own)

    @property
    def filters(self) -> bool:
        """Whether any row filters the vocabulary."""
        rows = zip(self.temperature, self.top_k, self.top_p, self.min_p, strict=True)
        return any(t > 0 and (k > 0 or p < 1 or m > 0) for t, k, p, m in rows)


def defaults_of(target: Any, given: GenerationConfig | None) -> Any:
    """The model's ``generation_config``, or a user's with its unset fields filled from the model's."""
    if given is None:
        return target.generation_config
    if not isinstance(given, GenerationConfig):
        raise TypeError(
            f"generation_config={type(given).__name__}: pass a transformers GenerationConfig, or its options."
        )
    merged = copy.deepcopy(given)
    merged.update(defaults_only=True, **target.generation_config.to_dict())
    return merged


def resolve(
    defaults: GenerationConfig, rows: int, width: int, options: dict[str, Any], vocab_size: int = INT32_MAX
) -> Request:
    """Merge ``options`` over the model's defaults, as transformers' ``generate`` does.

    Args:
        defaults: the target's ``generation_config``; not modified.
        rows: of the batch.
        width: columns of the padded prompt, which ``max_length`` counts.
        options: fields of a ``GenerationConfig``, ``seed``, ``tokenizer``, ``response_format``, those of
            `torch_dflash.requests.rules.OURS` and of `torch_dflash.requests.logprobs.OF_LOGITS`; None means
            unset, save for ``eos_token_id`` (`UNSET`) and ``use_cache``, where it is refused.
        vocab_size: of the target, which ids of options are checked against.

    Raises:
        ValueError: an option is out of range or cannot be honoured.
    """
    eos = options.pop("eos_token_id", UNSET)
    seed, tokenizer = options.pop("seed", None), options.pop("tokenizer", None)
    own = {name: options.pop(name, None) for name in OF_LOGITS}
    options["grammar"] = read_format(
        options.pop(RESPONSE_FORMAT, None), options.pop("grammar", None), tokenizer, rows
    )
    config = copy.deepcopy(defaults)
    # Before transformers sees them: its messages name no fix.
    if not isinstance(options.get("do_sample"), bool | None):
        raise ValueError(f"do_sample={options['do_sample']!r}: must be True, False or None (unset).")
    refuse_doubled_cache(options)
    check_pad(options.get("pad_token_id"))
    check_suppressed(options.get("suppress_tokens"))
    refuse_unsupported(SimpleNamespace(**options))
    per_row = {
        name: options.pop(name)
        for name in ("temperature", "top_k", "top_p", "min_p", "max_new_tokens", *PER_ROW)
        if name in ("max_new_tokens", *OURS)
        and options.get(name) is not None
        or isinstance(row_list(options.get(name)), list)
    }
    asked = {name: value for name, value in options.items() if value is not None}
    config.update(**asked)
    config.update(defaults_only=True, **config._get_default_generation_params())
    refuse_unsupported(config)
    logit_outputs = read_logit_outputs(config, own, vocab_size)
    sampled = bool(config.do_sample)
    if "temperature" in (asked | per_row) and not sampled:
        wanted = check_rows("temperature", per_row.get("temperature", config.temperature), rows)
        if any(wanted) and options.get("do_sample") is None:
            raise ValueError(
                f"temperature={wanted} while do_sample is unset and the model's default is greedy; "
                "pass do_sample=True to sample."
            )

    def row_values(name, off):
        value = per_row.get(name, getattr(config, name, None))
        return check_rows(name, off if value is None else value, rows)

    stops = stop_ids(config.eos_token_id if eos is UNSET else eos, rows)
    pad = check_pad(config.pad_token_id)
    budgets = _budgets(config, per_row, asked, rows, width)
    # Servers' own options are none of a config: transformers keeps such fields, and heeds none.
    wanted = {
        name: per_row.get(name, None if name in OURS else getattr(config, name, None)) for name in KINDS
    }
    request = Request(
        max_new_tokens=budgets,
        temperature=row_values("temperature", 1.0) if sampled else [0.0] * rows,
        top_k=row_values("top_k", 0),
        top_p=row_values("top_p", 1.0),
        min_p=row_values("min_p", 0.0),
        seed=row_seeds(seed, rows),
        stop_ids=stops,
        pad_token_id=next((int(ids[0]) for ids in stops if ids), 0) if pad is None else pad,
        processors=asked_processors(wanted, Batch(width, budgets, stops, sampled, vocab_size)),
        stopping=stop_rules_of(config, tokenizer),
        logit_outputs=logit_outputs,
    )
    _check_ranges(request)
    return request


def _budgets(config, per_row, asked, rows, width) -> list[int]:
    budget = per_row.get("max_new_tokens", config.max_new_tokens)
    if budget is None:
        if config.max_length == config._get_default_generation_params()["max_length"] and (
            "max_length" not in asked
        ):
            budget = config.max_length  # transformers' default: 20 tokens beyond the prompt
        else:
            budget = room_below(config.max_length, width)
    budgets = check_rows("max_new_tokens", budget, rows)
    for value in budgets:
        check_counts(max_new_tokens=value)
    return budgets


def room_below(max_length: Any, width: int) -> int:
    """The new tokens that ``max_length`` leaves after ``width`` columns of prompt; ``ValueError`` if none."""
    check_counts(max_length=max_length)
    if max_length <= width:
        raise ValueError(
            f"max_length={max_length} leaves no room after the prompt's {width} columns; pass "
            f"max_new_tokens, or a max_length of at least {width + 1}."
        )
    return max_length - width


def _check_ranges(request: Request) -> None:
    checks = {
        "temperature": (
            lambda v: 0 <= v <= FLOAT32_MAX,
            f"a number, 0 (greedy) or more, at most {FLOAT32_MAX:.1e} (float32)",
        ),
        "top_k": (
            lambda v: is_count(v) and 0 <= v <= INT32_MAX,
            f"an integer, 0 (off) or more, at most {INT32_MAX} (int32); pass 0 to keep every token",
        ),
        "top_p": (lambda v: 0 < v <= 1, "a number in (0, 1]"),
        "min_p": (lambda v: 0 <= v <= 1, "a number in [0, 1]"),
    }
    for name, (holds, rule) in checks.items():
        for value in getattr(request, name):
            if isinstance(value, bool) or not isinstance(value, Real) or not holds(value):
                raise ValueError(f"{name}={value!r}: must be {rule}.")
