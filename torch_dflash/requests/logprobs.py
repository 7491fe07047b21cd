"""Log-probabilities, logits and scores: options, checks, output fields."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from torch_dflash.checks import check_counts, check_flag
from torch_dflash.plan import OUTPUTS, DecodePlan
from torch_dflash.record import WHOLE
from torch_dflash.runtime import Progress

OF_LOGITS = ("output_logprobs", "top_logprobs")
"""Options that transformers does not have."""


@dataclass(frozen=True)
class LogitOutputs:
    """The options of `OUTPUTS` that are asked for; how many of the likeliest ids; are scores normalised."""

    outputs: tuple[str, ...] = ()
    top_logprobs: int = 0
    normalised: bool = False


def read_logit_outputs(config: Any, options: dict[str, Any], vocab_size: int) -> LogitOutputs:
    """Read the outputs that a call asks for; ``options`` are those of `OF_LOGITS`.

    Without ``return_dict_in_generate`` scores and logits have no place to go: transformers leaves them out.

    Raises:
        ValueError: an option is of the wrong type or out of range, or log-probabilities have no place to go.
    """
    logprobs, top = (options.get(name) for name in OF_LOGITS)
    requested = {name: getattr(config, name, None) for name in WHOLE.values()} | {"output_logprobs": logprobs}
    check_flag(**{name: value for name, value in requested.items() if value is not None})
    check_counts(least=0, top_logprobs=top)
    check_top(top or 0, vocab_size)
    ours = f"top_logprobs={top}" if top else "output_logprobs=True"
    requested |= {"output_logprobs": logprobs or bool(top)}
    if not config.return_dict_in_generate:
        if requested["output_logprobs"]:
            raise ValueError(
                f"{ours}: this call returns ids alone; pass return_dict_in_generate=True to generate, or "
                "call torch_dflash.stream."
            )
        return LogitOutputs()
    return LogitOutputs(
        tuple(name for name in OUTPUTS if requested[name]), top or 0, bool(config.renormalize_logits)
    )


def check_outputs(outputs: Any, top_logprobs: Any) -> None:
    """Raise ``ValueError`` unless an engine can be built for these options of `torch_dflash.compile`."""
    if not isinstance(outputs, tuple) or any(name not in OUTPUTS for name in outputs):
        raise ValueError(f"outputs={outputs!r}: must be a tuple of {', '.join(map(repr, OUTPUTS))}.")
    check_counts(least=0, top_logprobs=top_logprobs)


def check_top(top_logprobs: int, vocab_size: int) -> None:
    """Raise ``ValueError`` unless there are so many ids."""
    if top_logprobs > vocab_size:
        raise ValueError(f"top_logprobs={top_logprobs}: must be at most {vocab_size}, the target's ids.")


def check_logit_outputs(outputs: LogitOutputs, plan: DecodePlan) -> None:
    """Raise ``ValueError`` unless an engine of ``plan`` keeps what is asked for."""
    for name in outputs.outputs:
        if name not in plan.outputs:
            raise ValueError(
                f"{name} was asked for, but the engine was compiled without it; compile with "
                f"outputs=({name!r},)."
            )
    if outputs.top_logprobs > plan.top_logprobs:
        raise ValueError(
            f"top_logprobs={outputs.top_logprobs} was asked for, but the engine was compiled with "
            f"{plan.top_logprobs}; compile with as many."
        )


def check_streamed(outputs: LogitOutputs) -> None:
    """Raise ``ValueError`` for what has no place in the pieces of a text."""
    for name in WHOLE.values():
        if name in outputs.outputs:
            raise ValueError(
                f"{name}=True: a stream has log-probabilities alone; pass output_logprobs=True, or call "
                "generate."
            )


def fields_of(outputs: LogitOutputs, progress: Progress, starts: list[int], device: Any) -> dict[str, Any]:
    """Fields of a `GenerateOutput`: outputs for each row's new tokens, which begin at ``starts``."""
    ends = [int(progress.committed[row]) for row in range(len(starts))]

    def columns(name: str, size: int | None = None) -> Tensor:
        """[new, B, ...], NaN (ids: -1) where a row has ended."""
        rows = [progress.record.of(name, *span) for span in zip(range(len(ends)), starts, ends, strict=True)]
        like = rows[0][0][:size] if size else rows[0][0]
        unset = np.nan if like.dtype.kind == "f" else -1
        filled = np.full((max(map(len, rows)), len(rows), *like.shape), unset, like.dtype)
        for row, entries in enumerate(rows):
            filled[: len(entries), row] = entries if size is None else np.stack(entries)[:, :size]
        return torch.from_numpy(filled)

    fields: dict[str, Any] = {}
    for name, option in WHOLE.items():
        if option in outputs.outputs:
            whole = columns(name)
            normalised = name == "scores" and outputs.normalised
            fields[name] = (torch.log_softmax(whole, dim=-1) if normalised else whole).unbind(0)
    if "output_logprobs" in outputs.outputs:
        fields["logprobs"] = columns("logprobs").t().contiguous().to(device)
    if outputs.top_logprobs:
        for name in ("top_logprobs", "top_ids"):
            fields[name] = columns(name, outputs.top_logprobs).transpose(0, 1).contiguous().to(device)
    return fields
