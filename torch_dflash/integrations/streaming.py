"""The streamer that transformers' ``generate`` was given, which it does not hand to a custom generate."""

from __future__ import annotations

import inspect
from typing import Any

from torch import Tensor
from transformers.generation import GenerationMixin

_mixin: Any = GenerationMixin
NEAR = 10
_GIVEN = "streamer of dflash"
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


def streamer_of_caller(model: Any) -> AfterPrompt | None:
    """What ``model.generate(streamer=...)`` was given, asked by what it calls; None for any other caller.

    transformers puts the prompt into it, drops it, and never ends it: its reader would wait for ever. No
    argument leads to it, so it is read off the call itself, which gives it once.
    """
    frame = inspect.currentframe()
    for _ in range(NEAR):  # a wrapper of the user's may stand between
        frame = frame.f_back if frame is not None and frame.f_code is not _GENERATE else frame
    if frame is None or frame.f_code is not _GENERATE:
        return None
    names = frame.f_locals
    streamer = names.get("streamer")
    if streamer is None or names.get("self") is not model or _GIVEN in names:
        return None
    names[_GIVEN] = True  # a name beside the call's own stays while the call lasts
    return AfterPrompt(streamer)
