"""`MatcherRow`: a row's grammar on the host, which gives the allowed next tokens of a block."""

from __future__ import annotations

import itertools
import threading
import weakref
from collections.abc import Sequence
from typing import Any

import numpy as np

from torch_dflash.grammars.vocabulary import ALL, Vocabulary, holds, library, set_bits, words_of

_numbers = itertools.count()
_rows: weakref.WeakValueDictionary[int, MatcherRow] = weakref.WeakValueDictionary()


class NoTokenLeft(ValueError):
    """A row's grammar had no token left to pick, or its matcher gave up."""


class MatcherRow:
    """llguidance's matcher for the answer of one row of one request.

    Results depend on the arguments alone: the matcher keeps its last place and moves back and forth, so calls
    may come in any number and order.

    Attributes:
        handle: the key by which compiled programs find the row; valid as long as the request lives.
        reads: host calls of programs with this row.
    """

    def __init__(self, source: str, vocabulary: Vocabulary, stop_ids: Sequence[int], number: int = 0):
        self._number = number
        self._new = lambda: library("llguidance").LLMatcher(vocabulary.tokenizer, source, log_level=0)
        self._matcher: Any = self._new()
        self._taken: list[int] = []
        self._stops, self._ends = frozenset(stop_ids), vocabulary.eos
        self._size, self._words_known = vocabulary.size, words_of(vocabulary.size)
        self._lock, self._error = threading.Lock(), ""
        self.reads = 0
        self.handle = next(_numbers)
        _rows[self.handle] = self

    def allowed(self, answer: list[int], drafts: list[int], words: int) -> np.ndarray:
        """Bits [1 + drafts, words] of the tokens allowed after ``answer`` and after each draft.

        After a draft that is not allowed, which is cut, and after the end all tokens are allowed.
        """
        rows = np.full((1 + len(drafts), words), ALL)
        with self._lock:
            if not self._go_to(answer):
                return rows
            for at, token in enumerate([*drafts, -1]):
                rows[at] = self._bits(words)
                if token in self._stops or not holds(rows[at], token) or not self._take([token]):
                    break
        return rows

    def takes(self, answer: list[int], token: int) -> bool:
        """Whether ``token`` may follow ``answer``; of a forced text `allowed` has only one spelling."""
        with self._lock:
            return self._go_to(answer) and self._matcher.validate_tokens([token]) == 1

    def check(self, answer: list[int]) -> None:
        """Raise `NoTokenLeft` unless ``answer`` begins a text, or is a whole text and a stop id."""
        text = answer[:-1] if answer[-1:] and answer[-1] in self._stops else answer
        with self._lock:
            whole = self._go_to(text) and (text is answer or self._matcher.is_accepting())
            place, error = len(self._taken), self._error
        if error:
            raise NoTokenLeft(f"row {self._number}: llguidance gave its grammar up: {error}")
        if not whole:
            raise refused(self._number, answer[place], place)

    def check_beginning(self, shown: str) -> None:
        """Raise ``ValueError`` if neither a first token nor the empty text is allowed."""
        bits = self.allowed([], [], self._words_known)[0]
        if self._error or not (bits.any() or self._matcher.is_accepting()):
            why = self._error or "no text of it can be spelt with the tokenizer's ids"
            raise ValueError(f"{shown}: no token may come first: {why}.")

    def _go_to(self, answer: list[int]) -> bool:
        """Whether the matcher reaches the end of ``answer``; else it stops before the first refused token."""
        taken = self._taken
        common = len(taken)
        if answer[:common] != taken:
            pairs = enumerate(zip(taken, answer, strict=False))
            common = next((at for at, (a, b) in pairs if a != b), min(len(taken), len(answer)))
        if common < len(taken) and not self._matcher.rollback(len(taken) - common):
            self._matcher, common = self._new(), 0
        self._taken = taken[:common]
        return self._take(answer[common:])

    def _take(self, tokens: list[int]) -> bool:
        # A drafted id past the tokenizer's ids (a padded vocabulary) would end the matcher.
        ends = (at for at, token in enumerate(tokens) if token in self._ends or token >= self._size)
        known = next(ends, len(tokens))
        count = self._matcher.try_consume_tokens(tokens[:known])
        self._taken = self._taken + tokens[:count]
        self._note_error()
        return count == len(tokens)

    def _bits(self, words: int) -> np.ndarray:
        bits = np.zeros(words, np.int32)
        if not self._matcher.is_stopped():
            found = np.frombuffer(self._matcher.compute_bitmask(), np.int32)[:words]
            bits[: len(found)] = found
        set_bits(bits, self._ends | self._stops, False)
        if self._matcher.is_accepting():
            set_bits(bits, self._stops, True)
        self._note_error()
        return bits

    def _note_error(self) -> None:
        if self._matcher.is_error():
            self._error = " ".join(self._matcher.get_error().partition("<state>")[0].split())
            self._matcher, self._taken = self._new(), []


def allowed_bits(
    tokens: np.ndarray, length: np.ndarray, handles: np.ndarray, starts: np.ndarray, words: int
) -> np.ndarray:
    """The tokens allowed after each row of a block, bits [B, M, words]; a pure function.

    Args:
        tokens: [B, S] the rows' texts. length: [B, M] tokens before each row of the block.
        handles: [B] keys of `MatcherRow`; -1: all tokens are allowed. starts: [B] lengths of the prompts.

    Raises:
        RuntimeError: the request of a row has ended.
    """
    bits, counted = np.full((*length.shape, words), ALL), set()
    for at, handle in enumerate(handles.tolist()):
        if handle < 0:
            continue
        row = _rows.get(handle)
        if row is None:
            raise RuntimeError(f"row {at}: the grammar of its request is gone; decode from the prompt again.")
        row.reads += handle not in counted
        counted.add(handle)
        begin, first, last = int(starts[at]), int(length[at, 0]), int(length[at, -1])
        if first >= begin:  # within the prompt no token is picked
            answer, drafts = tokens[at, begin:first].tolist(), tokens[at, first:last].tolist()
            bits[at] = row.allowed(answer, drafts, words)
    return bits


def refused(row: int, token: int, place: int) -> NoTokenLeft:
    """The error for a token that the grammar does not allow: no allowed token was left to pick."""
    return NoTokenLeft(
        f"row {row}: token {token}, new token {place}, is not one that its grammar allows: none was left. "
        "Other options (suppress_tokens, bad_words_ids, min_new_tokens, forced ids, your own processors) "
        "removed the allowed ones, or the tokenizer has none; change them."
    )
