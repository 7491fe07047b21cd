"""`stream`: a text as it comes, with what was drafted of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_dflash.generation import prepare
from torch_dflash.proposers.choose import Missing
from torch_dflash.requests.logprobs import check_streamed


@dataclass(frozen=True)
class Piece:
    """What one read brought a row, maybe nothing.

    Attributes:
        tokens: new ids, the stop id included.
        text: the whole characters that they complete, without special tokens; "" without a tokenizer.
        drafted: of each token, whether it was drafted and accepted: all that a target pass commits but the
            last, which is the target's own pick.
        done: whether the row has ended.
        logprobs: with ``output_logprobs``, of each token the logarithm of its probability by the target's own
            logits, whatever temperature, processors and filters made of them.
        top_logprobs: with ``top_logprobs=K``, in the place of each token (id, logarithm) pairs of the
            likeliest ids, in order.
    """

    tokens: list[int]
    text: str
    drafted: list[bool]
    done: bool
    logprobs: list[float] | None = None
    top_logprobs: list[list[tuple[int, float]]] | None = None


def stream(
    target: Any,
    drafter: Any = Missing,
    input_ids: Tensor | None = None,
    attention_mask: Tensor | None = None,
    *,
    tokenizer: Any = None,
    processors: tuple | None = None,
    runtime: str = "xla",
    rounds_per_chunk: int = 4,
    **options: Any,
) -> Iterator[list[Piece]]:
    """Yield a `Piece` for each row after each chunk of rounds, until all rows have ended.

    It may be abandoned at any point: what it held is freed with it. The pieces of a row together are what
    `generate` returns of it with the same arguments.

    Args:
        target, drafter, input_ids, attention_mask, processors, runtime: as in `generate`.
        tokenizer: for the text, and for ``stop_strings``.
        rounds_per_chunk: rounds between two pieces; more of them cost fewer reads.
        **options: as in `generate`.

    Raises:
        TypeError, ValueError: bad input, at once and not at the first piece.
    """
    asked = {"tokenizer": tokenizer, "rounds_per_chunk": rounds_per_chunk, "return_dict_in_generate": True}
    asked |= options | {"processors": processors, "runtime": runtime}
    call = prepare("stream", target, drafter, input_ids, attention_mask, asked)
    check_streamed(call.request.logprobs)
    gains = call.engine().gains(call.request)
    rows = len(call.request.rows)
    texts = [None if tokenizer is None else TextStream(tokenizer) for _ in range(rows)]
    return pieces(gains, texts)


def pieces(gains: Generator[list[Any], None, None], texts: list[TextStream | None]) -> Iterator[list[Piece]]:
    """The rows' gains, one list for each read, with what their tokens are as text."""
    over = [False] * len(texts)
    with closing(gains):  # at once, though a traceback holds it
        for gained in gains:
            pieces = []
            for row, (gain, text) in enumerate(zip(gained, texts, strict=True)):
                final = gain.done and not over[row]
                over[row] = gain.done
                said = "" if text is None else text.push(gain.tokens, final=final)
                drafted = _drafted(gain.rounds, len(gain.tokens))
                pieces.append(Piece(gain.tokens, said, drafted, gain.done, gain.logprobs, gain.top))
            yield pieces


def _drafted(rounds: list[int], count: int) -> list[bool]:
    """Which of ``count`` tokens were drafted; those before the first of ``rounds`` are a prompt's pass's."""
    last_of_a_pass = [token == committed - 1 for committed in rounds for token in range(committed)]
    return [False] * (count - len(last_of_a_pass)) + [not last for last in last_of_a_pass][:count]


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
