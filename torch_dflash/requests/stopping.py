"""Stop strings, deadlines and user criteria, checked on the host between chunks of rounds.

Tokens that rounds have added behind a row's end are dropped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from transformers import MaxTimeCriteria, StopStringCriteria

from torch_dflash.checks import row_list
from torch_dflash.record import HostRecord


@runtime_checkable
class StopRule(Protocol):
    """Looks at the texts that a read has brought, prompts included."""

    def ends(self, texts: Sequence[np.ndarray], since: Sequence[int], record: HostRecord) -> list[int | None]:
        """Tokens to keep of each row that ends here, else None; those from ``since`` on are new.

        ``record``: what is kept of each new token besides (`torch_dflash.record`).
        """
        ...


class StopStrings:
    """``stop_strings``: a row ends with the token that completes one, as transformers tells it."""

    def __init__(self, criterion: StopStringCriteria):
        self._criterion = criterion
        self.strings = list(criterion.stop_strings)

    def ends(self, texts: Sequence[np.ndarray], since: Sequence[int], record: HostRecord) -> list[int | None]:
        return [self._end(text, start) for text, start in zip(texts, since, strict=True)]

    def _end(self, text: np.ndarray, since: int) -> int | None:
        ids: Any = torch.from_numpy(text.astype(np.int64))[None]
        counts = range(since + 1, len(text) + 1)
        return next((count for count in counts if bool(self._criterion(ids[:, :count], None))), None)


class Criterion:
    """A user's own ``StoppingCriteria``, asked once for every token, as transformers asks it."""

    def __init__(
        self,
        criterion: Any,
        prompts: Tensor,
        lengths: Sequence[int],
        pad_token_id: int,
        normalised: bool = False,
    ):
        if not callable(criterion):
            raise TypeError(f"stopping_criteria holds {criterion!r}: must be functions of (ids, scores).")
        self._criterion, self._prompts, self._pad = criterion, prompts, pad_token_id
        self._lengths = lengths
        self._scores: list[Tensor] = []
        self._normalised = normalised
        self.name = f"stopping_criteria {getattr(criterion, '__name__', type(criterion).__name__)}"

    def ends(self, texts: Sequence[np.ndarray], since: Sequence[int], record: HostRecord) -> list[int | None]:
        answer = self._criterion(self._ids(texts), self._scores_of(texts, record))
        ended = torch.as_tensor(answer if isinstance(answer, int | Tensor | list) else [])
        if ended.is_floating_point() or tuple(ended.shape) not in ((), (1,), (len(texts),)):
            raise ValueError(
                f"{self.name} returned {answer!r}: return a bool, or one for each of {len(texts)} rows."
            )
        ended = (ended & 1).bool().expand(len(texts))  # of a number transformers' own sum keeps the last bit
        return [len(text) if over else None for text, over in zip(texts, ended.tolist(), strict=True)]

    def _ids(self, texts: Sequence[np.ndarray]) -> Any:
        """The prompts as they were given, then what is new; rows that have ended are filled up."""
        new = [text[start:] for text, start in zip(texts, self._lengths, strict=True)]
        width = max(map(len, new))
        filled = [np.pad(row, (0, width - len(row)), constant_values=self._pad) for row in new]
        fresh = torch.from_numpy(np.stack(filled).astype(np.int64))
        return torch.cat([self._prompts.long().cpu(), fresh], dim=1)

    def _scores_of(self, texts: Sequence[np.ndarray], record: HostRecord) -> tuple[Tensor, ...] | None:
        """With ``output_scores``, those [B, V] of each new token; NaN where a row has ended."""
        if "scores" not in record:
            return None
        while rows := {row: found for row in range(len(texts)) if (found := self._next(texts, record, row))}:
            ended = np.full_like(next(iter(rows.values()))[0], np.nan)
            step = [rows[row][0] if row in rows else ended for row in range(len(texts))]
            scores = torch.from_numpy(np.stack(step))
            self._scores.append(torch.log_softmax(scores, dim=-1) if self._normalised else scores)
        return tuple(self._scores)

    def _next(self, texts: Sequence[np.ndarray], record: HostRecord, row: int) -> list[np.ndarray]:
        at = self._lengths[row] + len(self._scores)
        return record.of("scores", row, at, at + 1) if at < len(texts[row]) else []


class Deadline:
    """``max_time``: rows end with the first read after so many seconds; those that wait begin before."""

    def __init__(self, seconds: float):
        self._last = time.perf_counter() + seconds

    def ends(self, texts: Sequence[np.ndarray], since: Sequence[int], record: HostRecord) -> list[int | None]:
        over = time.perf_counter() > self._last
        return [len(text) if over else None for text in texts]


def read_criteria(
    criteria: Iterable[Any],
    prompts: Tensor,
    lengths: Sequence[int],
    pad_token_id: int,
    normalised: bool = False,
) -> list[StopRule]:
    """Stop rules of transformers' criteria and of a user's.

    Args:
        prompts: [B, T], padded. lengths: of each without padding.
        pad_token_id: fills rows that have ended.
        normalised: whether scores are logarithms of probabilities (``renormalize_logits``).
    """
    found: list[StopRule] = []
    if not isinstance(criteria, Iterable):
        raise TypeError(f"stopping_criteria={type(criteria).__name__}: must be a list of criteria.")
    for item in criteria:
        if type(item) is StopStringCriteria:
            found.append(StopStrings(item))
        elif type(item) is MaxTimeCriteria:
            found.append(Deadline(item.max_time + item.initial_timestamp - time.time()))
        else:
            found.append(Criterion(item, prompts, lengths, pad_token_id, normalised))
    return found


def stop_rules_of(config: Any, tokenizer: Any) -> list[StopRule]:
    """Stop rules of ``config.stop_strings`` and ``config.max_time``.

    Raises:
        ValueError: stop strings that are none, or without a ``tokenizer``; a time that is none.
    """
    found: list[StopRule] = []
    strings, seconds = config.stop_strings, config.max_time
    strings = [strings] if isinstance(strings, str) else row_list(strings)
    if strings not in (None, []):
        if not isinstance(strings, list) or not all(isinstance(one, str) and one for one in strings):
            raise ValueError(
                f"stop_strings={config.stop_strings!r}: must be strings of at least a character."
            )
        if not hasattr(tokenizer, "get_vocab"):
            raise ValueError(f"stop_strings={strings!r} needs the model's tokenizer; pass tokenizer=.")
        found.append(StopStrings(StopStringCriteria(tokenizer, strings)))
    if seconds is not None:
        if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
            raise ValueError(f"max_time={seconds!r}: must be a number of seconds of at least 0.")
        found.append(Deadline(seconds))
    return found
