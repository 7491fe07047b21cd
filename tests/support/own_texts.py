"""Holds engines of one target against its own texts, greedy and sampled in one batch."""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch_dflash as td
from support.scripted import own_text, run


class OwnTexts:
    """The target's own texts of some prompts.

    Args:
        target: called at the first use. sampled: options of a sampled call. sizes: of the engines.
    """

    def __init__(self, target: Callable[[], Any], prompts: list, new: int, sampled: dict, sizes: dict):
        self.target, self.prompts, self.new = target, prompts, new
        self.options, self.sizes = sampled, sizes
        self.own, self.sampled = cache(self._own), cache(self._sampled)

    def made(self, drafter: Any, runtime: str = "eager", **options: Any) -> td.Engine:
        """An engine of the target with ``drafter``; None decodes plainly."""
        return td.compile(self.target(), drafter, runtime=runtime, **(self.sizes | options))

    def check(self, engine: td.Engine) -> tuple[Any, Any]:
        """Assert the target's own texts; returns the statistics of greedy and of sampled rows."""
        texts, greedy = run(engine, self.prompts, max_new_tokens=self.new, do_sample=False)
        assert texts == [self.own(row) for row in range(len(self.prompts))]
        texts, drawn = run(engine, self.prompts, max_new_tokens=self.new, **self.options)
        assert texts == self.sampled()
        return greedy, drawn

    def _own(self, row: int) -> list[int]:
        return own_text(self.target(), self.prompts[row], self.new)

    def _sampled(self) -> list[list[int]]:
        return run(self.made(None), self.prompts, max_new_tokens=self.new, **self.options)[0]
