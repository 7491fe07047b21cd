"""Options of the evaluate stage. The command line reads them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dflash.checks import Runtime, check_counts, check_runtime


@dataclass(frozen=True)
class EvaluateOptions:
    """How prompts are decoded: greedily, so that the text is the target's whatever drafts.

    Args:
        limit: first prompts of each set. max_new_tokens: per turn. batch_size: rows decoded together.
        verify_width: how much of the block is verified, the anchor included; unset: all of it.
        shuffled: the control: each row drafts from another row's features.
        runtime: as in `torch_dflash.generate`.
        chat_template_kwargs: further variables of the chat template.
    """

    limit: int = 100
    max_new_tokens: int = 256
    batch_size: int = 8
    verify_width: int | None = None
    shuffled: bool = False
    runtime: Runtime = "xla"
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        counts = ("limit", "max_new_tokens", "batch_size", "verify_width")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_runtime(self.runtime)
        if self.shuffled and self.batch_size < 2:
            raise ValueError(f"batch_size={self.batch_size} with shuffled=True: needs 2 rows to shuffle.")
