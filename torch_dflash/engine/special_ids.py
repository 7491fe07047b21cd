"""Stop ids and the padding id of a call."""

from __future__ import annotations

from typing import Any

from torch_dflash.checks import INT32_MAX, check_rows, is_count, row_list


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
        entries = check_rows("eos_token_id", eos, rows)
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
