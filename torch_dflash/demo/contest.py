"""Answers one question by an engine or by transformers, with the time of each piece."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.generation.streamers import BaseStreamer

Show = Callable[[list[int]], None]
Method = Callable[[torch.Tensor, int, Show], "TimedAnswer"]
"""``(prompt ids [1, T], most new tokens, callback for each piece) -> TimedAnswer``."""


@dataclass
class TimedAnswer:
    """An answer in pieces: the first from the prompt's pass, then one from each target pass.

    ``times``: seconds since the call.
    """

    started: float = field(default_factory=time.perf_counter)
    pieces: list[list[int]] = field(default_factory=list)
    times: list[float] = field(default_factory=list)

    def add(self, piece: list[int]) -> None:
        """Record a piece with the present time; ignores an empty one."""
        if piece:
            self.pieces.append(piece)
            self.times.append(time.perf_counter() - self.started)

    @property
    def tokens(self) -> list[int]:
        """The whole answer."""
        return [token for piece in self.pieces for token in piece]

    @property
    def time_per_output_token(self) -> float:
        """Seconds after the first piece (TPOT); NaN without further pieces."""
        count = sum(map(len, self.pieces[1:]))
        return (self.times[-1] - self.times[0]) / count if count else float("nan")


def ours(engine: Any, stops: list[int]) -> Method:
    """A `torch_dflash.Engine` as a method; it should read after each round (``rounds_per_chunk=1``)."""

    def answer(ids: torch.Tensor, new: int, show: Show) -> TimedAnswer:
        options: dict[str, Any] = {"max_new_tokens": new, "do_sample": False, "eos_token_id": stops}
        found = TimedAnswer()
        for (piece,) in engine.stream(ids, torch.ones_like(ids), **options):
            found.add(piece)
            show(piece)
        return found

    return answer


class _Pieces(BaseStreamer):
    def __init__(self, answer: TimedAnswer, show: Show):
        self.answer, self.show, self._prompt_seen = answer, show, False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_seen:
            piece = value.flatten().tolist()
            self.answer.add(piece)
            self.show(piece)
        self._prompt_seen = True

    def end(self) -> None:
        """Do nothing: no piece is held back."""


def transformers_own(target: Any, stops: list[int], **more: Any) -> Method:
    """transformers' greedy ``generate`` as a method; ``more``: further arguments."""

    def answer(ids: torch.Tensor, new: int, show: Show) -> TimedAnswer:
        found = TimedAnswer()
        options: Any = {"max_new_tokens": new, "do_sample": False, "eos_token_id": stops or None}
        options |= {"pad_token_id": stops[0] if stops else 0, "streamer": _Pieces(found, show)}
        target.generate(ids, attention_mask=torch.ones_like(ids), **options, **more)
        return found

    return answer
