"""The streamer that transformers' ``generate`` was given, which it does not hand to a custom generate."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from types import CodeType
from typing import Any

from torch import Tensor
from transformers.generation import utils

NEAR = 100
_GIVEN = "streamer of dflash"


class AfterPrompt:
    """``streamer`` for a generation whose prompt it has been given already; ``taken`` is called in use."""

    def __init__(self, streamer: Any, taken: Callable[[], None]):
        self._streamer, self._taken = streamer, taken
        self._prompt_is_next = True

    def put(self, ids: Tensor) -> None:
        """Hand on new ids, not the prompt."""
        self._taken()
        if not self._prompt_is_next:
            self._streamer.put(ids)
        self._prompt_is_next = False

    def end(self) -> None:
        """Nothing follows."""
        self._streamer.end()


def streamer_of_caller(model: Any) -> AfterPrompt | None:
    """The streamer of the ``model.generate`` call that this function runs in; None in any other caller.

    transformers puts the prompt into it, drops it, and never ends it: its reader would wait for ever. No
    argument leads to it, so it is read off the call itself, which gives it to the first that uses it.
    """
    frame = inspect.currentframe()
    for _ in range(NEAR):  # a wrapper of the user's may stand between
        frame = frame.f_back if frame is not None and not _is_generate(frame.f_code) else frame
    if frame is None or not _is_generate(frame.f_code):
        return None
    names = frame.f_locals
    streamer = names.get("streamer")
    if streamer is None or names.get("self") is not model or _GIVEN in names:
        return None
    # A name beside the call's own stays while the call lasts.
    return AfterPrompt(streamer, taken=lambda: names.update({_GIVEN: True}))


def _is_generate(code: CodeType) -> bool:
    """Whether code is that of transformers' ``generate``, by its file: a user may have wrapped the method."""
    return code.co_name == "generate" and code.co_filename == utils.__file__
