"""Per-row windows of a buffer: reads and writes of every cache but pages.

Each batch row has its own offset. On XLA a write is one ``dynamic_update_slice`` per row (an
element-wise scatter is two orders of magnitude slower on TPU), so `write_rows` is `lowerable`.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from torch_dflash.ops.lowerable import lowerable

WHOLE = 64
"""Attention ends at a multiple of this many slots, so that passes of few and many rows sum the same keys."""


@lowerable
def write_rows(
    buffer: Tensor,
    rows: Tensor,
    start: Int[Tensor, " B"],
    dim: int,
    count: Int[Tensor, " B"] | None = None,
) -> Tensor:
    """Put ``rows`` into ``buffer`` at ``start[b]`` along ``dim`` of each batch row b; return the buffer.

    The buffer is consumed: written in place eagerly, donated under XLA. With ``count`` only the first
    ``count[b]`` rows are written.

    Where anything is written, ``start[b] + rows.shape[dim]`` must not exceed the buffer: XLA clamps the
    start and would overwrite other rows, so every buffer ends in slack (`DecodePlan.slack`).

    Shapes: ``buffer`` [B, ..., S, ...], ``rows`` [B, ..., R, ...] with S and R at ``dim``.
    """
    step = torch.arange(rows.shape[dim], device=rows.device)
    at = start[:, None] + step
    shape = [1] * buffer.ndim
    shape[0], shape[dim] = at.shape
    rows = rows.to(buffer.dtype)
    if count is not None:
        at = at.clamp(max=buffer.shape[dim] - 1)
        old = buffer.gather(dim, at.long().view(shape).expand_as(rows))
        rows = torch.where((step < count[:, None]).view(shape), rows, old)
    return buffer.scatter_(dim, at.long().view(shape).expand_as(rows), rows)


def read_rows(buffer: Tensor, start: Int[Tensor, " B"], width: int) -> Tensor:
    """Read ``width`` entries of each row of ``buffer`` [B, S] from ``start[b]``, clamped at the end."""
    at = positions(start, width)
    return buffer.gather(1, at.clamp(max=buffer.shape[1] - 1).long())


def positions(start: Int[Tensor, " B"], width: int) -> Int[Tensor, "B width"]:
    """``start[b] .. start[b] + width - 1`` of each row."""
    return start[:, None] + torch.arange(width, device=start.device, dtype=start.dtype)


def reach(start: Int[Tensor, " B"], width: int, slots: int) -> int:
    """Slots up to the last of the rows ``start[b] .. start[b] + width - 1``, rounded by `last_used`."""
    return last_used(start, slots, lambda: int(start.max()) + width)


def last_used(known: Tensor, slots: int, end: Callable[[], int]) -> int:
    """The number of slots that ``end`` computes from ``known``, rounded up to a multiple of `WHOLE`.

    All ``slots`` where the host would have to wait for the number: off the CPU, and in programs.
    """
    return min(-(-end() // WHOLE) * WHOLE, slots) if known.device.type == "cpu" else slots


def clear_rows(buffer: Tensor, rows: Bool[Tensor, " B"]) -> Tensor:
    """``buffer`` [B, ...] with zeros in the batch rows marked in ``rows``."""
    return torch.where(rows.view(-1, *[1] * (buffer.ndim - 1)), torch.zeros_like(buffer), buffer)


@lowerable
def take_slot(buffer: Tensor, row: Int[Tensor, ""]) -> Tensor:
    """Batch row ``row`` of ``buffer`` [B, ...] as a new tensor [1, ...]."""
    return buffer.index_select(0, row.view(1).long())


@lowerable
def put_slot(buffer: Tensor, part: Tensor, row: Int[Tensor, ""]) -> Tensor:
    """Put ``part`` [1, ...] into batch row ``row`` of ``buffer`` [B, ...]; return the buffer.

    The buffer is consumed: written in place eagerly, donated under XLA.
    """
    return buffer.index_copy_(0, row.view(1).long(), part.to(buffer.dtype))


def take_row(rows: Tensor, index: Int[Tensor, " B"]) -> Tensor:
    """``rows[b, index[b]]`` kept as one row: [B, R, ...] -> [B, 1, ...]."""
    at = index.long().view(-1, *[1] * (rows.ndim - 1)).expand(-1, 1, *rows.shape[2:])
    return rows.gather(1, at)
