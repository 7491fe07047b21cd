"""The values of options that processors stand for, checked; None, or what asks for nothing, is nothing."""

from __future__ import annotations

import math
from collections.abc import Callable
from numbers import Real
from typing import Any

from torch_dflash.checks import INT32_MAX, check_counts, check_rows, is_count, row_list

_NUMBERS: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "repetition_penalty": (1.0, lambda v: 0 < v < math.inf, "a number above 0; 1.0 for none"),
    "presence_penalty": (0.0, math.isfinite, "a finite number; 0.0 for none"),
    "frequency_penalty": (0.0, math.isfinite, "a finite number; 0.0 for none"),
    "no_repeat_ngram_size": (
        0,
        lambda v: is_count(v) and 0 <= v <= INT32_MAX,
        "an integer of at least 0, in int32; 0 for none",
    ),
    "min_new_tokens": (
        0,
        lambda v: is_count(v) and 0 <= v <= INT32_MAX,
        "an integer of at least 0, in int32; 0 for none",
    ),
    "typical_p": (1.0, lambda v: 0 < v <= 1, "a number in (0, 1]; 1.0 for all tokens"),
    "epsilon_cutoff": (0.0, lambda v: 0 <= v < 1, "a number in [0, 1); 0.0 for all tokens"),
    "eta_cutoff": (0.0, lambda v: 0 <= v < 1, "a number in [0, 1); 0.0 for all tokens"),
}
_OF_SAMPLES = ("typical_p", "epsilon_cutoff", "eta_cutoff")


def check_numbers(options: dict[str, Any], rows: int, sampled: bool) -> dict[str, list]:
    """Options that are one number, or one for each row; None where a row asks for nothing."""
    found = {}
    for name, (off, holds, rule) in _NUMBERS.items():
        values = check_rows(name, options.get(name), rows)
        for value in values:
            number = isinstance(value, Real) and not isinstance(value, bool)
            if value is not None and not (number and holds(value)):
                raise ValueError(f"{name}={value!r}: must be {rule}.")
        unused = name in _OF_SAMPLES and not sampled
        found[name] = [None if unused or value is None or value == off else value for value in values]
    check_counts(least=0, min_length=options.get("min_length"))
    return found


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
        form = "lists of token ids with a bias, as [[[5], -1.5], [[7, 8], 2.0]]"
        pairs = list(given.items()) if isinstance(given, dict) else [row_list(pair) for pair in given]
    found: dict[tuple[int, ...], float] = {}
    for pair in pairs:
        pair_ids, bias = pair if isinstance(pair, list | tuple) and len(pair) == 2 else (None, None)
        ids = row_list(pair_ids)
        number = isinstance(bias, int | float) and not isinstance(bias, bool) and bias < math.inf
        if not isinstance(ids, list) or not ids or not number or not all(map(is_count, ids)):
            shown = pair_ids if name == "bad_words_ids" else pair
            raise ValueError(f"{name} holds {shown!r}: must be {form}.")
        assert bias is not None
        _check_ids(name, ids, vocab_size)
        found[tuple(map(int, ids))] = float(bias)
    return list(found.items())


def id_list(name: str, options: dict[str, Any], vocab_size: int) -> list[int]:
    """One id or a list of them, each once.

    Raises:
        ValueError: something that is no id of the target's vocabulary.
    """
    given = row_list(options.get(name))
    if given is None:
        return []
    ids = given if isinstance(given, list) else [given]
    _check_ids(name, ids, vocab_size)
    return list(dict.fromkeys(map(int, ids)))


def check_suppressed(given: Any) -> None:
    """Raise ``ValueError`` unless ``suppress_tokens`` is a list of ids, of which transformers makes a set."""
    ids = row_list(given)
    if ids is not None and not isinstance(ids, list):
        raise ValueError(f"suppress_tokens={given!r}: must be a list of token ids, as [5, 7].")
    for token in ids or ():
        if not is_count(token):
            raise ValueError(f"suppress_tokens holds {token!r}: must be token ids of the target.")


def check_decay(given: Any) -> tuple[int, float] | None:
    """``exponential_decay_length_penalty``: (first new token that it changes, factor of each)."""
    if given is None:
        return None
    pair = row_list(given)
    whole = isinstance(pair, list) and len(pair) == 2 and is_count(pair[0]) and isinstance(pair[1], Real)
    if not whole or not 0 <= pair[0] < 2**30 or isinstance(pair[1], bool) or not 0 < pair[1] < math.inf:
        raise ValueError(
            f"exponential_decay_length_penalty={given!r}: must be (number of tokens from 0 on, factor "
            "above 0), as (30, 1.01)."
        )
    return None if pair[1] == 1 else (int(pair[0]), float(pair[1]))


def power_of_two(needed: int, least: int) -> int:
    """A size that holds ``needed``; 0 stays 0, so that what nobody asks for takes no room."""
    return max(least, 1 << (needed - 1).bit_length()) if needed else 0


def _check_ids(name: str, ids: list, vocab_size: int) -> None:
    for token in ids:
        if not is_count(token) or not 0 <= token < vocab_size:
            raise ValueError(
                f"{name} holds {token!r}: must be token ids of the target, 0 to {vocab_size - 1}."
            )
