"""Prompts: Hugging Face's padded layout comes in, ragged rows and their chunks go on."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedConfig

from torch_dflash.checks import field_of, is_count, row_list
from torch_dflash.plan import MIN_BUCKET, whole_tiles
from torch_dflash.state import PromptChunk

WORTH = 2048
"""Padded rows that are worth a pass more: a CPU computes as many while a program is compiled, and weights are
read in the time of few of them."""


def check_ids(input_ids: Any) -> None:
    """Raise ``TypeError`` or ``ValueError`` unless ``input_ids`` is an integer tensor [B, T] with a row."""
    if not isinstance(input_ids, Tensor):
        raise TypeError(f"input_ids={type(input_ids).__name__}: pass a LongTensor [B, T].")
    if input_ids.is_floating_point() or input_ids.is_complex() or input_ids.dtype == torch.bool:
        raise TypeError(f"input_ids has dtype {input_ids.dtype}: token ids are integers; pass a LongTensor.")
    if input_ids.ndim != 2 or input_ids.shape[0] == 0:
        raise ValueError(f"input_ids has shape {tuple(input_ids.shape)}: pass [B, T] with at least one row.")


def real_tokens(ids: np.ndarray, attention_mask: Tensor | None, pads: list[int | None]) -> np.ndarray:
    """Booleans [B, T] that mark the text of ``ids``; without a mask a row's own pad id is padding.

    Raises:
        TypeError, ValueError: the mask is not one of 0 and 1 in the shape of the ids.
    """
    if attention_mask is None:
        keep = [
            np.full(row.shape, True) if pad is None else row != pad
            for row, pad in zip(ids, pads, strict=True)
        ]
        return np.stack(keep)
    if not isinstance(attention_mask, Tensor):
        raise TypeError(f"attention_mask={type(attention_mask).__name__}: pass a tensor [B, T] of 0 and 1.")
    if tuple(attention_mask.shape) != ids.shape:
        raise ValueError(
            f"attention_mask has shape {tuple(attention_mask.shape)}, input_ids {ids.shape}; "
            "pass a 2-D mask of the same shape."
        )
    # An additive mask (0 and -inf) means the opposite: never guess.
    if not ((attention_mask == 0) | (attention_mask == 1)).all():
        raise ValueError(
            "attention_mask holds values other than 0 and 1; pass 1 for real tokens, 0 for padding."
        )
    return attention_mask.detach().cpu().numpy() != 0


def check_positions(position_ids: Any, keep: np.ndarray) -> None:
    """Raise ``ValueError`` unless ``position_ids`` are those of every decoder here: a row's own count from 0.

    Args:
        position_ids: [B, T], or broadcast to it; leading axes (rotary sections) must agree. None: unset.
        keep: [B, T], which tokens are real; the positions of padding mean nothing.
    """
    if position_ids is None:
        return
    given, expected = np.asarray(row_list(position_ids)), np.cumsum(keep, axis=1) - 1
    try:
        same = bool(((given == expected) | ~keep).all())
    except ValueError:  # shapes that do not meet
        same = False
    if not same:
        raise ValueError(
            "position_ids are not those of the mask, attention_mask.cumsum(-1) - 1; block decoding counts "
            "positions itself: leave position_ids out."
        )


def split_rows(
    input_ids: Tensor,
    attention_mask: Tensor | None,
    vocab_size: int,
    pads: list[int | None],
    position_ids: Any = None,
) -> list[np.ndarray]:
    """Cut padding off: [B, T] ids (left or right padded) to B int32 arrays of real tokens.

    Args:
        input_ids: integer ids.
        attention_mask: [B, T], 1 = real. None: every token counts, save that tokens equal to a row's entry of
            ``pads`` are padding, as in transformers.
        vocab_size: ids must lie below it.
        pads: each row's padding id, None where it is unset or one of the row's stop ids.
        position_ids: the caller's, which must be those of the mask.

    Raises:
        TypeError, ValueError: naming what is wrong with the ids or the mask, before anything runs.
    """
    check_ids(input_ids)
    ids = input_ids.detach().cpu().numpy()
    keep = real_tokens(ids, attention_mask, pads)
    check_positions(position_ids, keep)
    rows = []
    for row, (tokens, real, pad) in enumerate(zip(ids, keep, pads, strict=True)):
        where = np.flatnonzero(real)
        span = slice(where[0], where[-1] + 1) if where.size else slice(None)
        left_out = tokens[span][~real[span]]
        # transformers makes such a mask where its user gave none, so a given mask is no sign of intent.
        if left_out.size and pad is not None and (left_out == pad).all():
            where_it_is = "inside its prompt" if where.size else "and nothing else: an empty prompt"
            raise ValueError(
                f"row {row} of input_ids holds pad_token_id={pad} {where_it_is}. It is taken for "
                "padding; if it is text, pass attention_mask explicitly, with 1 for every real token."
            )
        if where.size == 0:
            raise ValueError(f"row {row} of input_ids has an empty prompt; give at least one token.")
        if left_out.size:
            raise ValueError(f"attention_mask of row {row} has a gap; padding must lie at one end or both.")
        prompt = tokens[where]
        bad = prompt[(prompt < 0) | (prompt >= vocab_size)]
        if bad.size:
            raise ValueError(
                f"input_ids of row {row} holds {int(bad[0])}, outside the vocabulary [0, {vocab_size}); "
                "use the target's own tokenizer."
            )
        rows.append(prompt.astype(np.int32))
    return rows


def pad_rows(rows: list[list[int]]) -> tuple[Tensor, Tensor]:
    """Ragged ids as (input_ids [B, T], attention_mask [B, T]), int64, padded at the end."""
    width = max(map(len, rows))
    ids, mask = torch.zeros(len(rows), width, dtype=torch.long), torch.zeros(len(rows), width).long()
    for row, tokens in enumerate(rows):
        ids[row, : len(tokens)], mask[row, : len(tokens)] = torch.tensor(tokens), 1
    return ids, mask


def bucket(length: int) -> int:
    """The power of two, at least `MIN_BUCKET`, that holds ``length``."""
    return max(MIN_BUCKET, 1 << (length - 1).bit_length())


def chunk_widths(length: int, largest: int, slots: int, worth: int) -> Iterator[int]:
    """Bucket sizes that cover ``length`` prompt positions: full chunks, then what `split` makes of the rest.

    ``slots`` is how many positions exist from the start: a bucket that would run past it (XLA would clamp
    its start and overwrite good rows) is replaced by smaller ones. ``worth``: as in `split`.
    """
    done = 0
    while done < length:
        width = largest if length - done > largest else split(length - done, worth)[0]
        while width > MIN_BUCKET and done + width > slots:
            width //= 2
        yield width
        done += width


def split(length: int, worth: int) -> list[int]:
    """The buckets, largest first, that cover ``length``: each further one saves over ``worth`` positions."""
    whole = bucket(length)
    half = whole // 2
    if whole == MIN_BUCKET:
        return [whole]
    parts = [half, *split(length - half, worth)]
    return parts if sum(parts) + worth * (len(parts) - 1) < whole else [whole]


def prompt_chunks(
    rows: list[np.ndarray], batch_size: int, largest: int, slots: int, whole: bool = False
) -> Iterator[PromptChunk]:
    """The rows as `PromptChunk` pieces, padded to ``batch_size`` rows and power-of-two widths.

    ``whole``: as one piece instead, which no compiler is to see: it is as wide as the longest row.
    """
    longest, start = max(map(len, rows)), 0
    widths = [whole_tiles(longest)] if whole else chunk_widths(longest, largest, slots, WORTH // batch_size)
    for width in widths:
        ids = torch.zeros(batch_size, width, dtype=torch.int32, device="cpu")
        count = torch.zeros(batch_size, dtype=torch.int32, device="cpu")
        following = torch.full((batch_size,), -1, dtype=torch.int32, device="cpu")
        for row, prompt in enumerate(rows):
            piece = prompt[start : start + width]
            ids[row, : len(piece)] = torch.from_numpy(piece)
            count[row] = len(piece)
            if start + width < len(prompt):
                following[row] = int(prompt[start + width])
        yield PromptChunk(ids, count, following)
        start += width


MEDIA = re.compile("image|img|pixel|video|vision|visual|audio|speech|media|input_features|mm_")
"""Names of arguments and fields that speak of something else than text."""
_ID = re.compile("_(id|index)$")
_EDGE = re.compile("^[be]o[aiv]_")  # where an image, a video or sound begins or ends


def check_text_only(rows: list[np.ndarray], target: Any) -> None:
    """Raise ``ValueError`` if a prompt holds a token that stands for an image, a video or sound.

    What belongs there is not read here, nor do the rows of an image see each other.

    Args:
        rows: ids of each prompt.
        target: its config, and the configs in it, name such tokens.
    """
    text = target.config.get_text_config()
    marks = [field_of(text, f"{name}_token_id") for name in ("bos", "pad", "eos")]
    usual = set(np.ravel(marks[:2])) | set(np.ravel(marks[2]))
    named = {token: name for token, name in media_tokens(target.config) if token not in usual}
    for row, prompt in enumerate(rows):
        found = np.isin(prompt, list(named)).nonzero()[0]
        if found.size:
            token = int(prompt[found[0]])
            raise ValueError(
                f"input_ids of row {row} holds {token}, the {named[token]} of the target's config: block "
                f"decoding reads text alone. Use the target's own generate for this prompt, or leave out "
                "what the token stands for."
            )


def media_tokens(config: PreTrainedConfig) -> Iterator[tuple[int, str]]:
    """Ids that stand for media, or begin or end them, by a config's own fields and those of its parts."""
    for name, value in vars(config).items():
        if isinstance(value, PreTrainedConfig):
            yield from media_tokens(value)
        elif _ID.search(name) and (MEDIA.search(name) or _EDGE.search(name)) and is_count(value):
            yield int(value), name
