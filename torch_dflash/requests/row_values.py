"""Stop ids, padding id and seeds of a call's rows."""

from __future__ import annotations

from typing import Any

import torch

from torch_dflash.checks import INT32_MAX, is_count, one_per_row, row_list


def stop_ids(eos: Any, rows: int) -> list[tuple[int, ...]]:
    """Each row's stop ids: one id or a list for all rows, or a list of lists, one per row.

    Raises:
        ValueError: not token ids, or not one list per row.
    """
    eos = row_list(eos)
    if eos is None:
        return [()] * rows
    if not isinstance(eos, list):
        stops = [(eos,)] * rows
    elif any(isinstance(entry, list | tuple) for entry in eos):
        entries = one_per_row("eos_token_id", eos, rows)
        stops = [tuple(entry) if isinstance(entry, list | tuple) else (entry,) for entry in entries]
    else:
        stops = [tuple(eos)] * rows
    for stop in [stop for row in stops for stop in row]:
        if not is_count(stop) or stop < 0:
            raise ValueError(
                f"eos_token_id holds {stop!r}: must be token ids; pass None or [] to never stop."
            )
        if stop > INT32_MAX:
            raise ValueError(
                f"eos_token_id holds {stop}: token ids are int32, at most {INT32_MAX}; pass the target's own "
                "stop ids, or None to never stop."
            )
    return stops


def check_pad(pad: Any) -> int | None:
    """``pad`` if it can be a token id (None: unset); `ValueError` otherwise."""
    if pad is None:
        return None
    given = row_list(pad)
    if not is_count(given):
        raise ValueError(f"pad_token_id={pad!r}: must be one integer token id.")
    if not 0 <= given <= INT32_MAX:
        raise ValueError(
            f"pad_token_id={given}: must be a token id, 0 to {INT32_MAX} (int32); pass the tokenizer's."
        )
    return int(given)


def drawn_seed() -> int:
    """A seed from torch's generator: ``torch.manual_seed`` rules, as everywhere in transformers."""
    return int(torch.randint(0, 2**31 - 1, (1,), device="cpu").item())


def row_seeds(seed: Any, rows: int) -> list[int]:
    """One seed per row; a single one is counted up, for rows of a batch must not share their noise.

    Raises:
        ValueError: not an integer of 64 bits, or not one per row.
    """
    given = row_list(drawn_seed() if seed is None else seed)
    seeds = given if isinstance(given, list) else [given]
    for value in seeds:
        if not is_count(value):
            raise ValueError(f"seed={value!r}: must be an integer, or one integer per row.")
        if not -(2**63) <= value < 2**64:
            raise ValueError(f"seed={value}: must lie in [-2**63, 2**64); take it modulo 2**64.")
    if isinstance(given, list):
        return [int(value) for value in one_per_row("seed", given, rows)]
    return [int(given) + row for row in range(rows)]


def seed_key(seed: int) -> int:
    """The 32-bit key, unsigned, of a seed taken modulo 2**64 (so -1 is the seed 2**64 - 1).

    The low word, offset by 32 bits of the high word's splitmix64 finaliser (Steele et al. 2014): seeds that
    share their high word, as the rows of a batch do, never share a key; any other two do so by chance, one
    time in 2**32. The finaliser maps 0 to 0, so a seed below 2**32 is its own key; `sampling.noise_bits`
    does the rest of the mixing.
    """
    word = 2**64 - 1
    low, high = seed & 0xFFFFFFFF, (seed & word) >> 32
    high = (high ^ (high >> 30)) * 0xBF58476D1CE4E5B9 & word
    high = (high ^ (high >> 27)) * 0x94D049BB133111EB & word
    return low ^ ((high ^ (high >> 31)) & 0xFFFFFFFF)


def default_stop_ids(target: Any, tokenizer: Any) -> list[int]:
    """The model's stop ids, else the tokenizer's."""
    stops = target.generation_config.eos_token_id
    stops = tokenizer.eos_token_id if stops is None else stops
    return [] if stops is None else [*stops] if isinstance(stops, list | tuple) else [stops]


def penalty_of(target: Any) -> float | None:
    """The repetition penalty that the model asks for; None: none."""
    penalty = getattr(target.generation_config, "repetition_penalty", None)
    return None if penalty in (None, 1.0) else penalty
