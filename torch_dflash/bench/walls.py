"""Times methods in turn, one prompt at a time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from torch_dflash.demo.contest import Method as Answering

Times = dict[str, list[list[float | None]]]
"""Seconds per output token by method, for each prompt each repeat's; None: an answer of one piece."""


def time_methods(
    methods: dict[str, Answering],
    prompts: list[list[int]],
    new: int,
    repeats: int = 1,
    clock: Callable[[], float] = time.perf_counter,
) -> Times:
    """Let each method answer each prompt, in turn within a repeat; all are warm.

    A method hands out a piece when its tokens are on the host, so every time includes the round that made
    them. The prompt's own pass ends with the first piece and is not counted.
    """
    times: Times = {name: [[] for _ in prompts] for name in methods}
    for number, prompt in enumerate(prompts):
        ids = torch.tensor([prompt])
        for _ in range(repeats):
            for name, answer in methods.items():
                times[name][number].append(_seconds(answer, ids, new, clock))
    return times


def _seconds(answer: Answering, ids: torch.Tensor, new: int, clock: Callable[[], float]) -> float | None:
    seen: list[tuple[float, int]] = []
    answer(ids, new, lambda piece: seen.append((clock(), len(piece))))
    count = sum(length for _, length in seen[1:])
    return (seen[-1][0] - seen[0][0]) / count if count else None


def ratios(times: Times, plain: str, method: str) -> list[float]:
    """Plain decoding's seconds over the method's, for each prompt and repeat that both have."""
    pairs = zip(times[plain], times[method], strict=True)
    return [
        one / other
        for own, others in pairs
        for one, other in zip(own, others, strict=True)
        if one is not None and other is not None
    ]


def wall_row(times: Times, plain: str, method: str) -> dict[str, Any]:
    """A method's ratio to plain decoding (median and quartiles) and its seconds per output token."""
    found = ratios(times, plain, method)
    quartiles = statistics.quantiles(found, n=4, method="inclusive") if len(found) > 1 else found * 3
    own = [seconds for prompt in times[method] for seconds in prompt if seconds is not None]
    return {
        "speedup": round(statistics.median(found), 4) if found else None,
        "quartiles": [round(quartiles[0], 4), round(quartiles[2], 4)] if found else None,
        "seconds_per_token": statistics.median(own) if own else None,
        "spread": times[method],
    }
