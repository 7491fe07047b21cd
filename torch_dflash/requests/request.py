"""`Row` and `Request`: a text to decode with its own options, and a call of several."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers.generation import logits_process

from torch_dflash.checks import INT32_MAX
from torch_dflash.plan import DecodePlan
from torch_dflash.processors.grammars import RowGrammar
from torch_dflash.processors.interface import Processor
from torch_dflash.processors.options import FLOAT32_MAX, Option, Twin, whole
from torch_dflash.processors.warpers import FIRST
from torch_dflash.requests.logprobs import LogitOutputs
from torch_dflash.requests.row_values import seed_key
from torch_dflash.requests.stopping import StopRule
from torch_dflash.rows import RowRequests
from torch_dflash.state import Sampling

UNSET: Any = type("Unset", (), {"__repr__": lambda self: "<unset>"})()


def _option(name: str, off: Any, holds: Any, must: str, kind: type, after: tuple[str, ...]) -> Option:
    twin = Twin(kind, lambda item, call: getattr(item, name), after=after)
    return Option(name, off, holds, must, per_row=True, samples=True, twin=twin)


# Which warpers may stand before another: top-k keeps the same tokens at any temperature and after min-p, and
# min-p compares with the best token alone; top-p weighs all that is left.
SAMPLING: dict[str, Option] = {
    option.name: option
    for option in (
        _option(
            "temperature",
            1.0,
            lambda v: 0 <= v <= FLOAT32_MAX,
            f"a number, 0 (greedy) or more, at most {FLOAT32_MAX:.1e} (float32)",
            logits_process.TemperatureLogitsWarper,
            ("temperature", "top_k"),
        ),
        _option(
            "top_k",
            0,
            whole,
            f"an integer, 0 (off) or more, at most {INT32_MAX} (int32); pass 0 to keep every token",
            logits_process.TopKLogitsWarper,
            ("temperature", "top_k", "min_p"),
        ),
        _option(
            "top_p",
            1.0,
            lambda v: 0 < v <= 1,
            "a number in (0, 1]",
            logits_process.TopPLogitsWarper,
            ("temperature", "top_k"),
        ),
        _option(
            "min_p", 0.0, lambda v: 0 <= v <= 1, "a number in [0, 1]", logits_process.MinPLogitsWarper, FIRST
        ),
    )
}
"""Options of sampling that a round applies itself, in this order."""


@dataclass(frozen=True)
class Row:
    """One text to decode.

    Attributes:
        prompt: its ids without padding, int32.
        temperature: 0 is greedy. top_k: 0 is off.
        rules: processors, and the row's value for each.
        stopping: stop rules besides stop ids and lengths.
        logprobs: outputs of logits.
    """

    prompt: np.ndarray
    max_new_tokens: int
    temperature: float | int = 0
    top_k: int = 0
    top_p: float | int = 1
    min_p: float | int = 0
    seed: int = 0
    stop_ids: tuple[int, ...] = ()
    rules: Mapping[Processor, Any] = field(default_factory=dict)
    stopping: tuple[StopRule, ...] = ()
    logprobs: LogitOutputs = LogitOutputs()

    @property
    def length(self) -> int:
        """Tokens of the prompt."""
        return len(self.prompt)

    @property
    def limit(self) -> int:
        """Most positions that the row may fill."""
        return self.length + self.max_new_tokens

    @property
    def filters(self) -> bool:
        """Whether it filters the vocabulary."""
        return self.temperature > 0 and (self.top_k > 0 or self.top_p < 1 or self.min_p > 0)

    @property
    def grammar(self) -> RowGrammar | None:
        """Its grammar, which lives as long as the row."""
        return next((value for value in self.rules.values() if isinstance(value, RowGrammar)), None)

    def asks(self, processor: Processor) -> Any:
        """The row's value for a processor that is compiled in; None: nothing."""
        return next((value for kind, value in self.rules.items() if processor.covers(kind)), None)


@dataclass(frozen=True)
class Request:
    """The rows of a call, its padding id, and the prompts [B, T] as they were given."""

    rows: list[Row]
    pad_token_id: int
    input_ids: Tensor

    @property
    def lengths(self) -> list[int]:
        """Tokens of each prompt."""
        return [row.length for row in self.rows]

    @property
    def processors(self) -> list[Processor]:
        """Those that any row asks for something."""
        return list(dict.fromkeys(kind for row in self.rows for kind in row.rules))

    def of_row(self, number: int) -> Request:
        """The request of one of its rows alone."""
        return replace(self, rows=[self.rows[number]], input_ids=self.input_ids[number : number + 1])

    @property
    def logprobs(self) -> LogitOutputs:
        """The outputs of logits, alike for all rows of a call."""
        return self.rows[0].logprobs


def row_requests(rows: list[Row], plan: DecodePlan) -> RowRequests:
    """The rows as tensors of the plan's batch, with idle rows done."""
    idle, spare = RowRequests.idle(plan), plan.batch_size - len(rows)

    def column(values: list, unused: Tensor) -> Tensor:
        return torch.tensor([*values, *unused[len(rows) :].tolist()], dtype=unused.dtype, device="cpu")

    def sampling(name: str) -> Tensor:
        return column([getattr(row, name) for row in rows], getattr(idle.sampling, name))

    starts = [*(row.length for row in rows), *[0] * spare]
    keys = [seed_key(row.seed) for row in rows]  # here, where Python's integers do not overflow
    return RowRequests(
        limit=column([row.limit for row in rows], idle.limit),
        stop_ids=column(
            [[*row.stop_ids, *[-1] * (plan.stop_slots - len(row.stop_ids))] for row in rows], idle.stop_ids
        ),
        done=column([False] * len(rows), idle.done),
        sampling=Sampling(
            **{name: sampling(name) for name in SAMPLING},
            seed=column([key - (key >> 31 << 32) for key in keys], idle.sampling.seed),
        ),
        rules=tuple(
            one.values([*(row.asks(one) for row in rows), *[None] * spare], starts) for one in plan.processors
        ),
    )
