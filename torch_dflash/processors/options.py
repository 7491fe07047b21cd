"""Options of a call that logits rules stand for: values, checks, and transformers' counterparts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch

from torch_dflash.checks import INT32_MAX, is_count, one_per_row, row_list

FLOAT32_MAX = torch.finfo(torch.float32).max


@dataclass(frozen=True)
class Batch:
    """The batch that options are read for, one entry a row.

    ``width``: columns of the padded prompt; ``sampled``: whether any row is.
    """

    width: int
    max_new_tokens: list[int]
    stop_ids: list[tuple[int, ...]]
    sampled: bool
    vocab_size: int


@dataclass(frozen=True)
class TransformersCall:
    """The call that transformers made a list of processors for.

    ``width``: columns of the prompts; ``max_length``: of the text with them; ``stop_ids``: of all rows;
    ``padding``: masked columns before each prompt; ``forces_first``: whether the token after a prompt of one
    is forced, which transformers then leaves to that.
    """

    width: int
    max_length: int
    stop_ids: frozenset[int]
    padding: tuple[int, ...] = ()
    forces_first: bool = False

    @property
    def begins(self) -> int:
        """Columns before the first token that is not forced."""
        return self.width + (self.width == 1 and self.forces_first)

    def stops_of(self, item: Any) -> bool:
        """Whether a processor was made for this call's stop ids."""
        return set(ids_of(item.eos_token_id)) == self.stop_ids


@dataclass(frozen=True)
class Twin:
    """transformers' processor for an option, and how the option is read off it.

    ``kind``: by exact type, for a subclass may do anything. ``value`` reads the option; ``holds``: whether
    an option can stand for it in a call, else ``otherwise`` is said. ``ban``: it only takes tokens away, so
    it may stand anywhere before a forced one. ``forces``: a token. ``sizes``: it asks how large a score is.
    ``after``: of a warper, the options that may stand before it and leave its effect.
    """

    kind: type
    value: Callable[[Any, TransformersCall], Any]
    holds: Callable[[Any, TransformersCall], bool] = lambda item, call: True
    otherwise: str = "for another prompt, length or stop id than this call's; pass {} as an option."
    ban: bool = False
    forces: bool = False
    sizes: bool = False
    after: tuple[str, ...] = ()


@dataclass(frozen=True)
class Option:
    """An option of a call.

    Args:
        name: transformers', or a server's.
        off: a value that asks for nothing, whatever the model's own config says.
        holds: of a number, whether it is in range.
        must: ends the message "name=value: must be ...".
        per_row: whether each row may have its own.
        samples: whether sampled rows alone heed it.
        ours: whether transformers has no such option.
        twin: transformers' processor for it.
    """

    name: str
    off: Any = ()
    holds: Callable[[Any], bool] | None = None
    must: str = ""
    per_row: bool = False
    samples: bool = False
    ours: bool = False
    twin: Twin | None = None

    def check(self, value: Any) -> None:
        """Raise ``ValueError`` unless ``value`` is a number in range."""
        number = isinstance(value, Real) and not isinstance(value, bool)
        if self.holds is not None and not (number and self.holds(value)):
            raise ValueError(f"{self.name}={value!r}: must be {self.must}.")

    def numbers(self, given: dict[str, Any], batch: Batch) -> list[Any]:
        """One number, or one of each row; None where a row asks for nothing.

        Raises:
            ValueError: no number in range, or not one a row.
        """
        values = one_per_row(self.name, given.get(self.name), len(batch.max_new_tokens))
        for value in values:
            if value is not None:
                self.check(value)
        unused = self.samples and not batch.sampled
        return [None if unused or value is None or value == self.off else value for value in values]


def whole(value: Any) -> bool:
    """Whether ``value`` is a count in int32."""
    return is_count(value) and 0 <= value <= INT32_MAX


def ids_of(tensor: Any) -> list[int]:
    """The ids of a tensor, flat."""
    return tensor.reshape(-1).tolist()


def id_list(name: str, options: dict[str, Any], vocab_size: int) -> list[int]:
    """One id or a list of them, each once.

    Raises:
        ValueError: something that is no id of the target's vocabulary.
    """
    given = row_list(options.get(name))
    if given is None:
        return []
    ids = given if isinstance(given, list) else [given]
    check_ids(name, ids, vocab_size)
    return list(dict.fromkeys(map(int, ids)))


def check_ids(name: str, ids: list, vocab_size: int) -> None:
    """Raise ``ValueError`` for something that is no id of the target's vocabulary."""
    for token in ids:
        if not is_count(token) or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {token!r}: must be token ids of the target, 0 to {vocab_size - 1}."
            )


def check_suppressed(given: Any) -> None:
    """Raise ``ValueError`` unless ``suppress_tokens`` is a list of ids, of which transformers makes a set."""
    ids = row_list(given)
    if ids is not None and not isinstance(ids, list):
        raise ValueError(f"suppress_tokens={given!r}: must be a list of token ids, as [5, 7].")
    for token in ids or ():
        if not is_count(token):
            raise ValueError(f"suppress_tokens holds {token!r}: must be token ids of the target.")


def check_sequences(name: str, given: Any, vocab_size: int) -> list[tuple[tuple[int, ...], float]]:
    """Ids and their bias: of ``bad_words_ids`` lists, of ``sequence_bias`` transformers' two forms."""
    if given is None:
        return []
    if not isinstance(given, list | tuple | dict):
        raise ValueError(f"{name}={given!r}: must be a list.")
    if name == "bad_words_ids":
        form = "lists of token ids, as [[5], [7, 8]]"
        pairs = [(ids, -math.inf) for ids in given]
    else:
        form = "lists of token ids with a bias in float32, as [[[5], -1.5], [[7, 8], 2.0]]"
        pairs = list(given.items()) if isinstance(given, dict) else [row_list(pair) for pair in given]
    found: dict[tuple[int, ...], float] = {}
    for pair in pairs:
        pair_ids, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        ids = row_list(pair_ids)
        number = isinstance(bias, int | float) and not isinstance(bias, bool)
        number = number and bias is not None and (bias == -math.inf or abs(bias) <= FLOAT32_MAX)
        if not isinstance(ids, list) or not ids or not number or not all(map(is_count, ids)):
            shown = pair_ids if name == "bad_words_ids" else pair
            raise ValueError(f"{name} holds {shown!r}: must be {form}.")
        assert bias is not None
        check_ids(name, ids, vocab_size)
        found[tuple(map(int, ids))] = float(bias)
    return list(found.items())


def power_of_two(needed: int, least: int) -> int:
    """A size that holds ``needed``; 0 stays 0, so that what nobody asks for takes no room."""
    return max(least, 1 << (needed - 1).bit_length()) if needed else 0
