"""What `generate` returns: transformers' output class with the statistics beside it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
import torch
from torch import LongTensor, Tensor
from transformers.generation.utils import GenerateDecoderOnlyOutput

from torch_dflash.engine.request import Request
from torch_dflash.engine.stats import DecodeStats, acceptance_lengths
from torch_dflash.engine.told import tell
from torch_dflash.runtime import Progress


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
    input_ids: Tensor,
    request: Request,
    progress: Progress,
    read_at: list[float],
    compilations: int,
    prefilled: int,
) -> GenerateOutput:
    """Turn the last host read into an output; arguments as in `stats_of`."""
    stats = stats_of(request, progress, read_at, compilations, prefilled)
    sequences = join_rows(input_ids, request.lengths, progress, request.pad_token_id)
    told = tell(request.told, progress, request.lengths, input_ids.device)
    return GenerateOutput(sequences=cast(LongTensor, sequences), stats=stats, **told)


def stats_of(
    request: Request, progress: Progress, read_at: list[float], compilations: int, prefilled: int
) -> DecodeStats:
    """What a call has done up to a host read.

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
        grammar_reads=max((grammar.reads for grammar in request.grammars if grammar), default=0),
    )


def join_rows(input_ids: Tensor, prompt_lengths: list[int], progress: Progress, pad_token_id: int) -> Tensor:
    """Back to Hugging Face layout: the prompt as given, then each row's new tokens, then padding."""
    ends = [int(progress.committed[row]) for row in range(len(prompt_lengths))]
    width = max(end - start for start, end in zip(prompt_lengths, ends, strict=True))
    fresh = torch.full((len(prompt_lengths), width), pad_token_id, dtype=torch.long, device="cpu")
    for row, (start, end) in enumerate(zip(prompt_lengths, ends, strict=True)):
        fresh[row, : end - start] = torch.from_numpy(progress.tokens[row, start:end].astype(np.int64))
    return torch.cat([input_ids.long(), fresh.to(input_ids.device)], dim=1)
