"""Tokens that come one by one, as text that never splits a character."""

from __future__ import annotations

from typing import Any


class Incremental:
    """Decode a growing list of ids: every piece is final, and together they are the text of all ids.

    Only the ids since the last two clean cuts are decoded again, so a long text costs no more per token.
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._read = 0  # ids before `_read` are shown; those from `_context` give spacing
        self._sent = 0  # characters shown of what follows `_read`

    def push(self, ids: list[int], final: bool = False) -> str:
        """Take in ``ids``; return what became readable. ``final``: also what never will."""
        self._ids += ids
        before = self._decode(self._ids[self._context : self._read])
        fresh = self._decode(self._ids[self._context :])[len(before) :]
        # Trailing replacements may still become a character when its other bytes arrive.
        whole = fresh if final else fresh.rstrip(REPLACEMENT)
        piece = whole[self._sent :]
        if whole == fresh and fresh:
            self._context, self._read, self._sent = self._read, len(self._ids), 0
        else:
            self._sent = max(self._sent, len(whole))
        return piece

    def _decode(self, ids: list[int]) -> str:
        return self._tokenizer.decode(ids, skip_special_tokens=True) if ids else ""


REPLACEMENT = "\ufffd"  # what a decoder writes for bytes that are no whole character (yet)
