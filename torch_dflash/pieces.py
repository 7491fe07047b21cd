"""`stream`: yields a text as it is decoded, with its drafted tokens marked."""

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
    """The new tokens of a row in one host read, maybe none.

    Attributes:
        tokens: new ids, the stop id included.
        text: the whole characters that they complete, without special tokens; "" without a tokenizer.
        drafted: whether each token was drafted and accepted: all tokens of a target pass but the last, which
            is the target's own pick.
        done: whether the row has ended.
        logprobs: with ``output_logprobs``, the log-probability of each token by the target's own logits,
            before temperature, processors and filters.
        top_logprobs: with ``top_logprobs=K``, for each token the (id, log-probability) pairs of the likeliest
            ids at its place, in order.
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

    It may be abandoned at any point, which frees its state. The pieces of a row together are its tokens from
    `generate` with the same arguments.

    Args:
        target, drafter, input_ids, attention_mask, processors, runtime: as in `generate`.
        tokenizer: for the text, and for ``stop_strings``.
        rounds_per_chunk: rounds between two pieces; more of them cost fewer reads.
        **options: as in `generate`.

    Raises:
        TypeError, ValueError: bad input, raised by this call and not at the first piece.
    """
    wanted = {"tokenizer": tokenizer, "rounds_per_chunk": rounds_per_chunk, "return_dict_in_generate": True}
    wanted |= options | {"processors": processors, "runtime": runtime}
    call = prepare("stream", target, drafter, input_ids, attention_mask, wanted)
    check_streamed(call.request.logprobs)
    gains = call.engine().gains(call.request)
    rows = len(call.request.rows)
    texts = [None if tokenizer is None else TextStream(tokenizer) for _ in range(rows)]
    return pieces(gains, texts)


def pieces(gains: Generator[list[Any], None, None], texts: list[TextStream | None]) -> Iterator[list[Piece]]:
    """Make pieces of the rows' new tokens, one list for each read."""
    over = [False] * len(texts)
    with closing(gains):  # closes at once, though a traceback may hold the generator
        for deltas in gains:
            pieces = []
            for row, (gain, stream) in enumerate(zip(deltas, texts, strict=True)):
                final = gain.done and not over[row]
                over[row] = gain.done
                text = "" if stream is None else stream.push(gain.tokens, final=final)
                drafted = _drafted(gain.rounds, len(gain.tokens))
                pieces.append(Piece(gain.tokens, text, drafted, gain.done, gain.logprobs, gain.top))
            yield pieces


def _drafted(rounds: list[int], count: int) -> list[bool]:
    # Tokens before the first of `rounds` come from the prompt's pass.
    last_of_a_pass = [token == committed - 1 for committed in rounds for token in range(committed)]
    return [False] * (count - len(last_of_a_pass)) + [not last for last in last_of_a_pass][:count]


class TextStream:
    """Turns ids that come one by one into text; no piece splits a character, and no piece changes later.

    Together the pieces are the text of all ids, without special tokens. A call decodes only the ids since the
    last two clean cuts, so the cost of a token does not grow with the text. One stream per row.

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
        self._sent = 0  # characters after `_read` that are shown

    def push(self, ids: list[int], final: bool = False) -> str:
        """Take in ``ids`` and return the text that they complete, which may be empty.

        Args:
            ids: new tokens of the row, in order.
            final: no more ids follow, so bytes of an incomplete character are returned, as U+FFFD.
        """
        self._ids += ids
        before = self._decode(self._ids[self._context : self._read])
        fresh = self._decode(self._ids[self._context :])[len(before) :]
        # Trailing replacements may become a character when its other bytes arrive.
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
