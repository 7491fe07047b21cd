"""Options of ``torch-dflash bench``; the command line reads them without torch."""

from __future__ import annotations

from dataclasses import dataclass

from torch_dflash.checks import Runtime, check_counts, check_runtime


@dataclass(frozen=True)
class BenchOptions:
    """Options for comparing methods.

    Args:
        limit: prompts of each set. max_new_tokens: of each answer.
        max_prompt_tokens: longer prompts are left out, and counted; unset: those beyond the context.
        batch_size: rows that decode together in counts; walls have one.
        decoded: answers of each set that are also decoded by methods that are else replayed, and the
            answers that transformers' own methods decode.
        walls: answers of each set that are timed, one at a time. repeats: of each of them.
        runtime: as in `torch_dflash.generate`.
    """

    limit: int = 30
    max_new_tokens: int = 64
    max_prompt_tokens: int | None = None
    batch_size: int = 8
    decoded: int = 5
    walls: int = 0
    repeats: int = 1
    runtime: Runtime = "xla"

    def __post_init__(self):
        check_counts(limit=self.limit, batch_size=self.batch_size, repeats=self.repeats)
        check_counts(least=2, max_new_tokens=self.max_new_tokens)
        check_counts(max_prompt_tokens=self.max_prompt_tokens)
        check_counts(least=0, decoded=self.decoded, walls=self.walls)
        check_runtime(self.runtime)
