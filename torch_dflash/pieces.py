"""`stream`: a text as it comes, with what was drafted of it."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from torch_dflash.engine.text import TextStream
from torch_dflash.engine.told import check_streamed
from torch_dflash.generation import read_call
from torch_dflash.proposers.choose import Missing


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
    options |= {"tokenizer": tokenizer, "rounds_per_chunk": rounds_per_chunk, "return_dict_in_generate": True}
    given = input_ids, attention_mask, options
    call = read_call("stream", target, drafter, given, processors, runtime)
    check_streamed(call.request.told)
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
