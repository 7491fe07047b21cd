"""Options of the regenerate stage. The command line reads them without torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch_dflash.checks import Runtime, check_counts, check_runtime


@dataclass(frozen=True)
class RegenerateOptions:
    """How the target answers.

    Args:
        max_new_tokens: longest answer, in tokens.
        max_prompt_tokens: longer prompts, and those without room for the longest answer in the target's
            context, are left out and counted.
        batch_size: rows decoded together.
        shard_size: prompts per file; a file is written when all its prompts are answered.
        sampled: answer with the model's own ``generation_config`` sampling, else greedily.
        seed: orders the prompts, and is the seed of sampled answers.
        runtime: as in `torch_dflash.generate`.
        chat_template_kwargs: further variables of the chat template; recorded with every answer.
    """

    max_new_tokens: int = 512
    max_prompt_tokens: int = 1024
    batch_size: int = 32
    shard_size: int = 256
    sampled: bool = False
    seed: int = 0
    runtime: Runtime = "xla"
    chat_template_kwargs: dict[str, Any] | None = None

    def __post_init__(self):
        counts = ("max_new_tokens", "max_prompt_tokens", "batch_size", "shard_size")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_runtime(self.runtime)
