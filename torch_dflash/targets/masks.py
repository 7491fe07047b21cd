"""Reads sliding windows from transformers' own mask functions."""

from __future__ import annotations

from collections.abc import Callable
from types import CellType, FunctionType
from typing import Any

import torch
from torch import Tensor
from transformers import masking_utils

FARTHEST = 1 << 20
"""The last position of a mask that is read."""
# The inner function of the overlay by which tokens of an image see each other.
_OVERLAY: Any = getattr(masking_utils, "blockwise_overlay", None)
_OF_BLOCKS = () if _OVERLAY is None else _OVERLAY.__code__.co_consts
NEAR = 40
"""Positions on either side of an edge that are compared one by one."""


def read_window(mask: Callable, context: int) -> int | None:
    """The sliding window of a causal mask: the positions that a row sees, itself included; None for all.

    Args:
        mask: a mask function of transformers, ``(batch, head, query, key) -> visible``, on index tensors.
        context: positions that the model was made for. A window of this width counts as none.

    Raises:
        ValueError: the mask is neither causal nor a causal sliding window; names the first odd position.
    """
    with torch.device("cpu"):  # not the caller's default device
        return _read_window(for_text(mask), context)


def for_text(mask: Any, blocks: bool = False) -> Any:
    """``mask`` for text: a traced overlay of image blocks gets block ids of -1 for its meta tensors.

    Only in transformers' own overlay does -1 mean text. A mask with other ids, such as packed documents',
    cannot be read and is refused.
    """
    if isinstance(mask, tuple | list):
        parts = map(for_text, mask)
        return type(mask)(*parts) if hasattr(mask, "_fields") else type(mask)(parts)
    if blocks and isinstance(mask, Tensor) and mask.is_meta:
        return torch.full((1, FARTHEST), -1)
    if not isinstance(mask, FunctionType) or not mask.__closure__:
        return mask
    of_blocks = mask.__code__ in _OF_BLOCKS
    cells = tuple(CellType(for_text(cell.cell_contents, of_blocks)) for cell in mask.__closure__)
    return FunctionType(mask.__code__, mask.__globals__, mask.__name__, mask.__defaults__, cells)


def _read_window(mask: Callable, context: int) -> int | None:
    last = min(context, FARTHEST) - 1
    window = last + 1 - _first_seen(mask, last)
    edges = {0, 1, NEAR, window - 1, window, window + 1, 2 * window, last // 2, last}
    for query in sorted(edge for edge in edges if 0 <= edge <= last):
        around = {query - window, query - window // 2, 0, query, min(query + window, last)}
        keys = {at + step for at in around for step in range(-NEAR, NEAR + 1)}
        key = torch.tensor(sorted(at for at in keys if 0 <= at <= last))
        wanted = (key <= query) & (query - key < window)
        odd = torch.nonzero(_sees(mask, query, key) != wanted)
        if len(odd):
            where = int(key[odd[0, 0]])
            verb = "does not see" if wanted[odd[0, 0]] else "sees"
            raise ValueError(f"position {query} {verb} position {where}")
    return window if window <= last else None


def _first_seen(mask: Callable, query: int) -> int:
    """The first position that ``query`` sees, by bisection: every accepted mask is one interval."""
    unseen, seen = -1, query
    while seen - unseen > 1:
        middle = (unseen + seen) // 2
        if bool(_sees(mask, query, torch.tensor([middle]))[0]):
            seen = middle
        else:
            unseen = middle
    return seen


def _sees(mask: Callable, query: int, key: Tensor) -> Tensor:
    zero = torch.zeros((), dtype=torch.long)
    visible = mask(zero, zero, torch.tensor([query])[:, None], key[None])
    return torch.as_tensor(visible).expand(1, len(key))[0]
