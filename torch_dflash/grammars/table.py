"""`TokenTable`: a regular expression as (automaton state, token class) -> next state."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from torch_dflash.grammars.matcher import MatcherRow, refused
from torch_dflash.grammars.regular import DEAD, FIRST, byte_automaton
from torch_dflash.grammars.vocabulary import ALL, Vocabulary, pack_bits, set_bits, words_of

MOST_STATES = 512
MOST_ENTRIES = 1 << 22
"""Integers of a row's tables: 16 MiB."""


@dataclass(frozen=True, eq=False)
class TokenTable:
    """The token-level automaton of a pattern.

    Attributes:
        following: int32 [states, classes]; `DEAD` where a token of the class may not follow.
        class_of: int32 [V], the class of each token of the tokenizer; tokens of class 0 never follow.
        accepts: bool [states], whether the text is complete.
        allowed: bits [states, words] of the allowed tokens; in `DEAD`, whose picks are cut, all tokens.
    """

    following: np.ndarray
    class_of: np.ndarray
    accepts: np.ndarray
    allowed: np.ndarray


class TableRow:
    """A table for one row of one request, with the row's stop ids."""

    reads = 0

    def __init__(self, table: TokenTable, stop_ids: Sequence[int], number: int = 0):
        self.table, self._stops, self._number = table, frozenset(stop_ids), number

    def arrays(self, vocab_size: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """(``following``, ``class_of`` and ``allowed`` for ``vocab_size`` ids, with the stop ids)."""
        table, classes = self.table, np.zeros(vocab_size, np.int32)
        classes[: len(table.class_of)] = table.class_of
        classes[list(self._stops)] = 0
        allowed = np.zeros((len(table.following), words_of(vocab_size)), np.int32)
        allowed[:, : table.allowed.shape[1]] = table.allowed
        set_bits(allowed, self._stops, False)
        allowed[table.accepts] |= pack_bits(np.isin(np.arange(vocab_size), list(self._stops)))
        allowed[DEAD] = ALL
        return table.following, classes, allowed

    def check(self, answer: list[int]) -> None:
        """Raise `NoTokenLeft` unless ``answer`` begins a text, or is a whole text and a stop id."""
        state, table = FIRST, self.table
        for place, token in enumerate(answer):
            if token in self._stops:
                right, following = bool(table.accepts[state]), DEAD
            else:
                known = token < len(table.class_of)
                following = int(table.following[state, table.class_of[token]]) if known else DEAD
                right = following != DEAD
            if not right:
                raise refused(self._number, token, place)
            state = following

    def check_beginning(self, shown: str) -> None:
        """Raise ``ValueError`` if no token may come first and the empty text is not allowed."""
        if not (self.table.following[FIRST].any() or self.table.accepts[FIRST]):
            raise ValueError(f"{shown}: no token may come first: the tokenizer's ids spell no text of it.")


def token_table(pattern: str, spelt: Sequence[bytes]) -> TokenTable:
    """The automaton of ``pattern`` (Rust's regex syntax) over tokens with the bytes ``spelt``; b"": no text.

    Raises:
        ValueError: the pattern is not read here, or its tables are too large.
    """
    step, accepts = byte_automaton(pattern, MOST_STATES)
    letters, letter_of = np.unique(
        step, axis=1, return_inverse=True
    )  # classes of bytes with equal next states
    letter_codes = bytes(letter_of.reshape(-1).tolist())
    never = bytes(np.flatnonzero((step == DEAD).all(axis=0)).tolist())
    texts = [text.translate(letter_codes, never) for text in spelt]
    texts = [b"" if len(text) < len(given) else text for text, given in zip(texts, spelt, strict=True)]
    words = {text: at for at, text in enumerate(dict.fromkeys(texts))}
    columns = np.ascontiguousarray(_walk(letters, list(words)).T)  # [words, states]
    columns = np.concatenate([np.zeros_like(columns[:1]), columns])  # the class that may never follow
    whole = columns.view(np.dtype((np.void, columns.dtype.itemsize * columns.shape[1]))).ravel()
    _, first, class_of = np.unique(whole, return_index=True, return_inverse=True)
    class_of = class_of.reshape(-1)
    order = np.argsort(class_of[0] != np.arange(len(first)), kind="stable")  # the dead class comes first
    following = columns[first[order]].T.astype(np.int32)
    class_of = np.argsort(order)[class_of[1:]].astype(np.int32)[[words[text] for text in texts]]
    alive = accepts.copy()
    while True:  # find the states from which tokens can spell an end
        more = alive | (alive[following] & (following != DEAD)).any(axis=1)
        if (more == alive).all():
            break
        alive = more
    following = np.where(alive[following], following, DEAD)
    check_size(pattern, following.shape[0], following.shape[1], len(spelt))
    allowed = np.stack([pack_bits(row[class_of]) for row in following != DEAD])
    allowed[DEAD] = ALL
    return TokenTable(following, class_of, accepts, allowed)


def check_same(table: TokenTable, source: str, vocabulary: Vocabulary, shown: str) -> None:
    """Raise ``ValueError`` unless each state of ``table`` allows the tokens of ``source``'s matcher.

    A state is compared after the first text that leads to it.
    """
    ends = (min(vocabulary.eos),)
    matched = MatcherRow(source, vocabulary, ends)
    _, class_of, allowed = TableRow(table, ends).arrays(vocabulary.size)
    example = {kind: token for token, kind in enumerate(class_of.tolist())}
    texts: dict[int, list[int]] = {FIRST: []}
    waiting = [FIRST]
    for state in waiting:  # the loop appends to it
        theirs = matched.allowed(texts[state], [], allowed.shape[1])[0]
        further = np.flatnonzero(np.unpackbits((allowed[state] & ~theirs).view(np.uint8), bitorder="little"))
        taken = (token not in ends and matched.takes(texts[state], token) for token in further.tolist())
        if (theirs & ~allowed[state]).any() or not all(taken):
            raise ValueError(
                f"{shown}: after ids {texts[state]} the table and llguidance read it differently; write it "
                "out ([0-9] for a digit, [a-z] for a letter), or pass device=False."
            )
        for kind, to in enumerate(table.following[state].tolist()):
            if to != DEAD and to not in texts:
                texts[to] = [*texts[state], example[kind]]
                waiting.append(to)


def check_size(pattern: str, states: int, classes: int, vocab_size: int) -> None:
    """Raise ``ValueError`` for tables too large for a row; sizes are rounded up to buckets."""
    states, classes = (1 << (size - 1).bit_length() for size in (states, classes))
    entries = states * (classes + vocab_size // 32 + 1) + vocab_size
    if states > MOST_STATES or entries > MOST_ENTRIES:
        raise ValueError(
            f"Grammar.regex({pattern!r}, device=True): its tables have {states} states and {entries} "
            f"entries, of at most {MOST_STATES} and {MOST_ENTRIES}; pass device=False, or a simpler pattern."
        )


def _walk(step: np.ndarray, spelt: Sequence[bytes]) -> np.ndarray:
    """The state after each text from each state, int16 [states, texts]."""
    lengths = np.array([len(text) for text in spelt])
    longest_first = np.argsort(-lengths, kind="stable")
    letters = np.zeros((len(spelt), max(int(lengths.max(initial=0)), 1)), np.uint8)
    for at, text in enumerate(spelt):
        letters[at, : len(text)] = np.frombuffer(text, np.uint8)
    letters, lengths = letters[longest_first], lengths[longest_first]
    ends = np.repeat(np.arange(len(step), dtype=np.int16)[:, None], len(spelt), axis=1)
    for at in range(letters.shape[1]):
        count = int((lengths > at).sum())
        for row in ends:  # numpy takes eight bytes for each index
            row[:count] = step[row[:count], letters[:count, at]]
    ends[:, lengths == 0] = DEAD
    found = np.empty_like(ends)
    found[:, longest_first] = ends
    return found
