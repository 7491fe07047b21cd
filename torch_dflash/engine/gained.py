"""What rows gain from one host read to the next."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from contextlib import closing

from torch_dflash.runtime import Gain, Progress


class Gained:
    """How far a caller has been told of each row, at first of its prompt of ``lengths`` tokens alone."""

    def __init__(self, lengths: Sequence[int]):
        self._shown, self._rounds = list(lengths), [0] * len(lengths)

    def by(self, progress: Progress) -> list[Gain]:
        """What each row has more than when this was asked last."""
        since = zip(self._shown, self._rounds, strict=True)
        gains = [_gain(progress, row, *known) for row, known in enumerate(since)]
        # A row that waits for pages has its prompt alone.
        rows = len(gains)
        self._shown, self._rounds = progress.known[:rows].tolist(), progress.rounds[:rows].tolist()
        return gains


def tokens_of(gains: Generator[list[Gain], None, None]) -> Iterator[list[list[int]]]:
    """Of each row's gain the tokens."""
    with closing(gains):  # at once, though a traceback holds it
        for gained in gains:
            yield [gain.tokens for gain in gained]


def _gain(progress: Progress, row: int, start: int, rounds: int) -> Gain:
    """A row's tokens from ``start`` on, and its rounds after the first ``rounds``."""
    end = int(progress.known[row])
    tokens, accepted = progress.tokens[row, start:end], progress.accepted[row, rounds : progress.rounds[row]]
    said = progress.record.logprobs(row, start, end), progress.record.top(row, start, end)
    return Gain(tokens.tolist(), accepted.tolist(), bool(progress.ended[row]), *said)
