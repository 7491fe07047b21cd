"""What a generation cost and what each target forward gained."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple


class Share(NamedTuple):
    """What a replica did of a call: the ``rows`` that it decoded, and its ``rounds`` for them."""

    rows: int
    rounds: int


@dataclass(frozen=True)
class DecodeStats:
    """Figures of one `generate` call. Times are host wall-clock seconds, ended by a read of the results.

    Attributes:
        acceptance_lengths: per row, the tokens committed by each target forward after prefill (accepted
            drafts and the bonus), trimmed at stop ids and at the cap.
        capped: per row, whether the cap cut the last round short of what was accepted.
        rounds: target forwards after prefill (of the longest row: rows share forwards).
        new_tokens: tokens generated, all rows together.
        time_to_first_token: from the call to the first token on the host (TTFT).
        time_per_output_token: time after the first token per further token of the longest row (TPOT); None
            where no row has a second token.
        compilations: XLA programs compiled during the call.
        prefilled: prompt tokens read by prefill, all rows together; a chat finds most of its prompts held.
        host_reads: reads of the state by the engine, one per chunk (eager rounds also test flags).
        grammar_reads: further reads, by grammars that are matched on the host: one a pass.
        replicas: the share of each replica, in their order; empty where there are none.
        widths: by the rows M of a verify pass, how many rounds had so many: what ``verify_width="auto"``
            chose, 1 for no draft. Of all replicas and rows, rounds behind a row's end included.
    """

    acceptance_lengths: list[list[int]]
    capped: list[bool]
    rounds: int
    new_tokens: int
    time_to_first_token: float
    time_per_output_token: float | None
    compilations: int
    host_reads: int
    prefilled: int
    grammar_reads: int = 0
    replicas: tuple[Share, ...] = ()
    widths: dict[int, int] = field(default_factory=dict)

    @property
    def whole_rounds(self) -> list[int]:
        """The acceptance length of every round of every row that the cap did not cut."""
        return [
            length
            for lengths, capped in zip(self.acceptance_lengths, self.capped, strict=True)
            for length in (lengths[:-1] if capped else lengths)
        ]

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per target forward (tau), rounds that the cap cut left out; nan without rounds."""
        whole = self.whole_rounds
        return sum(whole) / len(whole) if whole else float("nan")


def acceptance_lengths(accepted: list[int], after_first: int) -> tuple[list[int], bool]:
    """Trim one row's recorded counts to the tokens it kept after its first: (lengths, cap cut the last)."""
    lengths, left = [], after_first
    for count in accepted:
        if left <= 0:  # rounds may have gone on behind the end
            break
        lengths.append(min(count, left))
        left -= count
    return lengths, left < 0
