"""Tokens that come one by one, as text that never splits a character."""

from __future__ import annotations

from typing import Any


class TextStream:
    """Ids that come one by one, as text: no piece splits a character, and a piece shown never changes.

    Together the pieces are the text of all ids, without special tokens. A call decodes only the ids since the
    last two clean cuts, so a token of a long text costs no more than one of a short text. One stream per row.

    Args:
        tokenizer: anything with transformers' ``decode(ids, skip_special_tokens=True)``.

    ```python
    text = td.TextStream(tokenizer)
    for (ids,) in engine.stream(**inputs):
        print(text.push(ids), end="", flush=True)
    print(text.push([], final=True))
    ```
    """

    def __init__(self, tokenizer: Any):
        self._tokenizer = tokenizer
        self._ids: list[int] = []
        self._context = self._read = 0  # ids before `_read` are shown; those from `_context` give spacing
        self._sent = 0  # characters shown of what follows `_read`

    def push(self, ids: list[int], final: bool = False) -> str:
        """Take in ``ids`` and return the text that they complete, which may be empty.

        Args:
            ids: new tokens of the row, in order.
            final: no more will come: return bytes that are no whole character too, as U+FFFD.
        """
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
