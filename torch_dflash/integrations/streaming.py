"""The streamer that transformers' ``generate`` was given, which it does not hand to a custom generate."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

_mixin: Any = GenerationMixin
NEAR = 10
_GENERATE = inspect.unwrap(_mixin.generate).__code__


class AfterPrompt:
    """``streamer`` for a generation whose prompt it has been given already."""

    def __init__(self, streamer: Any):
        self._streamer = streamer
        self._prompt_is_next = True

    def put(self, ids: Tensor) -> None:
        """Hand on new ids, not the prompt."""
        if not self._prompt_is_next:
            self._streamer.put(ids)
        self._prompt_is_next = False

    def end(self) -> None:
        """Nothing follows."""
        self._streamer.end()


def streamer_of_caller() -> AfterPrompt | None:
    """What ``target.generate(streamer=...)`` was given, asked by what it calls; None for any other caller.

    transformers puts the prompt into it, drops it, and never ends it: its reader would wait for ever. No
    argument leads to it, so it is read off the call itself.
    """
    frame = inspect.currentframe()
    for _ in range(NEAR):  # a wrapper of the user's may stand between
        frame = frame.f_back if frame is not None and frame.f_code is not _GENERATE else frame
    frame = frame if frame is not None and frame.f_code is _GENERATE else None
    streamer = None if frame is None else frame.f_locals.get("streamer")
    return None if streamer is None else AfterPrompt(streamer)
