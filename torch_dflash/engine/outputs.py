"""`GenerateOutput` and `DecodeStats`: what `generate` returns."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from typing import NamedTuple, cast

import numpy as np
import torch
from torch import LongTensor, Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from torch_dflash.requests.logprobs import fields_of
from torch_dflash.requests.request import Request
from torch_dflash.runtime import Progress, RowDelta


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
    def tokens_per_round(self) -> float:
        """Tokens after the first over rounds, those that the cap cut included; nan without rounds."""
        lengths = [length for row in self.acceptance_lengths for length in row]
        return sum(lengths) / len(lengths) if lengths else float("nan")

    @property
    def mean_acceptance_length(self) -> float:
        """Mean tokens per target forward (tau), rounds that the cap cut left out; nan without rounds."""
        whole = self.whole_rounds
        return sum(whole) / len(whole) if whole else float("nan")


@dataclass
class GenerateOutput(GenerateDecoderOnlyOutput):
    """``sequences`` [B, T + new] in Hugging Face layout, ``stats``, and what else was asked for.

    Attributes:
        scores: with ``output_scores``, for each new token float32 [B, V] after processors and filters.
        logits: with ``output_logits``, for each new token the target's own, float32 [B, V].
        logprobs: with ``output_logprobs``, float32 [B, new]: the logarithm of each new token's probability by
            the target's own logits, whatever temperature, processors and filters made of them.
        top_logprobs, top_ids: with ``top_logprobs=K``, [B, new, K]: those of the likeliest ids, in order.

    Where a row has ended, and others go on, there is NaN (in ``top_ids`` -1). transformers has there what it
    computes over the padding. Scores and logits lie in the host's memory.
    """

    # The base class gives every field a default; these two are always set.
    sequences: torch.LongTensor = cast(LongTensor, None)
    stats: DecodeStats = cast(DecodeStats, None)
    logprobs: torch.FloatTensor | None = None
    top_logprobs: torch.FloatTensor | None = None
    top_ids: torch.LongTensor | None = None

    @property
    def new_tokens(self) -> list[list[int]]:
        """The ids each row gained, its stop id included, without padding."""
        counts = [1 + sum(lengths) for lengths in self.stats.acceptance_lengths]
        added = self.sequences[:, self.sequences.shape[1] - max(counts) :].tolist()
        return [row[:count] for row, count in zip(added, counts, strict=True)]


def collect(
    request: Request, progress: Progress, read_at: list[float], compilations: int, prefilled: int
) -> GenerateOutput:
    """The output of the last host read; arguments as in `stats_of`."""
    stats = stats_of(request, progress, read_at, compilations, prefilled)
    lengths, input_ids = request.lengths, request.input_ids
    sequences = join_rows(input_ids, lengths, progress, request.pad_token_id)
    fields = fields_of(request.logprobs, progress, lengths, input_ids.device)
    return GenerateOutput(sequences=cast(LongTensor, sequences), stats=stats, **fields)


def stats_of(
    request: Request, progress: Progress, read_at: list[float], compilations: int, prefilled: int
) -> DecodeStats:
    """Statistics of a call up to a host read.

    ``read_at`` holds when each read ended, in seconds; ``prefilled`` is how many prompt tokens were read.
    """
    lengths, capped, fresh = [], [], []
    for row, prompt_length in enumerate(request.lengths):
        after_first = int(progress.length[row]) - prompt_length
        accepted = progress.accepted[row, : int(progress.rounds[row])].tolist()
        trimmed, cut = acceptance_lengths(accepted, after_first)
        lengths.append(trimmed)
        capped.append(cut)
        fresh.append(after_first + 1)
    longest = max(fresh)
    return DecodeStats(
        acceptance_lengths=lengths,
        capped=capped,
        rounds=max(map(len, lengths)),
        new_tokens=sum(fresh),
        time_to_first_token=read_at[0],
        time_per_output_token=(read_at[-1] - read_at[0]) / (longest - 1) if longest > 1 else None,
        compilations=compilations,
        host_reads=len(read_at),
        prefilled=prefilled,
        widths=dict(sorted((+progress.widths).items())),
        grammar_reads=max((row.grammar.reads for row in request.rows if row.grammar), default=0),
    )


def join_rows(input_ids: Tensor, prompt_lengths: list[int], progress: Progress, pad_token_id: int) -> Tensor:
    """Back to Hugging Face layout: the prompt as given, then each row's new tokens, then padding."""
    ends = [int(progress.committed[row]) for row in range(len(prompt_lengths))]
    width = max(end - start for start, end in zip(prompt_lengths, ends, strict=True))
    fresh = torch.full((len(prompt_lengths), width), pad_token_id, dtype=torch.long, device="cpu")
    for row, (start, end) in enumerate(zip(prompt_lengths, ends, strict=True)):
        fresh[row, : end - start] = torch.from_numpy(progress.tokens[row, start:end].astype(np.int64))
    return torch.cat([input_ids.long(), fresh.to(input_ids.device)], dim=1)


class Deltas:
    """Tracks the tokens that a caller has seen of each row; at first prompts of ``lengths`` tokens."""

    def __init__(self, lengths: Sequence[int]):
        self._shown, self._rounds = list(lengths), [0] * len(lengths)

    def by(self, progress: Progress) -> list[RowDelta]:
        """Each row's tokens since the last call."""
        since = zip(self._shown, self._rounds, strict=True)
        gains = [_gain(progress, row, *known) for row, known in enumerate(since)]
        # A row that waits for pages has its prompt alone.
        rows = len(gains)
        self._shown, self._rounds = progress.known[:rows].tolist(), progress.rounds[:rows].tolist()
        return gains


def tokens_of(gains: Generator[list[RowDelta], None, None]) -> Iterator[list[list[int]]]:
    """The tokens alone of each row's delta."""
    with closing(gains):  # at once, though a traceback holds it
        for deltas in gains:
            yield [delta.tokens for delta in deltas]


def _gain(progress: Progress, row: int, start: int, rounds: int) -> RowDelta:
    """A row's tokens from ``start`` on, and its rounds after the first ``rounds``."""
    end = int(progress.known[row])
    tokens, accepted = progress.tokens[row, start:end], progress.accepted[row, rounds : progress.rounds[row]]
    scores = progress.record.logprobs(row, start, end), progress.record.top(row, start, end)
    return RowDelta(tokens.tolist(), accepted.tolist(), bool(progress.ended[row]), *scores)


class Share(NamedTuple):
    """A replica's share of a call: the ``rows`` that it decoded, and its ``rounds`` for them."""

    rows: int
    rounds: int


def acceptance_lengths(accepted: list[int], after_first: int) -> tuple[list[int], bool]:
    """Trim one row's recorded counts to the tokens it kept after its first: (lengths, cap cut the last)."""
    lengths, left = [], after_first
    for count in accepted:
        if left <= 0:  # rounds may have gone on behind the end
            break
        lengths.append(min(count, left))
        left -= count
    return lengths, left < 0
