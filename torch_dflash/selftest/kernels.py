"""Paged attention on the device, whichever form runs there, beside its plain form on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from torch_dflash.paged import LANES, paged_attention
from torch_dflash.selftest.checks import Check, within
from torch_dflash.selftest.side import Side

BATCH, PAGE, COLUMNS = 2, 16, 12


@dataclass(frozen=True)
class Shape:
    """G K/V heads of ``dim`` shared by ``heads`` query heads each, M rows."""

    groups: int
    heads: int
    rows: int
    dim: int
    options: dict[str, Any] = field(default_factory=dict)


SHAPES = {
    "verify of 16, GQA 4, head dim 128": Shape(4, 4, 16, 128),
    "one row, GQA 1, head dim 64": Shape(4, 1, 1, 64),
    "block of 10, GQA 8, window 37, soft cap, head dim 64": Shape(
        2, 8, 10, 64, {"window": 37, "softcap": 20.0}
    ),
    "prompt of 64, GQA 4, head dim 128": Shape(2, 4, 64, 128),
}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def paged_forms(side: Side) -> Iterator[Check]:
    """One check per shape and dtype: outputs, and the pages as they are afterwards."""
    for name, shape in SHAPES.items():
        for dtype, tolerance in TOLERANCES.items():
            arguments = _arguments(shape, dtype)
            wide = [tensor.float() if tensor.is_floating_point() else tensor.clone() for tensor in arguments]
            query, key, value, pages, table, start = wide
            wanted, kept = paged_attention(
                query, key, value, pages, table, start, shape.dim**-0.5, **shape.options
            )
            out, pool = side.attend(arguments, shape.dim**-0.5, shape.options)
            written = _difference(pool.float(), kept, table, start + shape.rows)
            error = float((out.float() - wanted).abs().max())
            note = "pages as they should be" if written == 0 else f"pages wrong by {written:.2e}"
            label = f"paged attention, {str(dtype).removeprefix('torch.')}, {name}"
            yield within(label, error if written == 0 else float("inf"), tolerance, note)


def _difference(one: torch.Tensor, other: torch.Tensor, table: torch.Tensor, end: torch.Tensor) -> float:
    """Largest difference of two pools below ``end`` [B]; what lies beyond is stale."""
    rows = ((one - other)[table.long()].abs().amax(dim=(2, 4))).flatten(1)
    return float(rows[torch.arange(rows.shape[1]) < end[:, None]].max())


def _arguments(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """query, key, value, pool, table and start; pages out of order, rows that end anywhere."""
    random = torch.Generator().manual_seed(shape.rows)

    def normal(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=random).to(dtype)

    pages = BATCH * COLUMNS
    width = -(-2 * shape.dim // LANES) * LANES
    pool = normal(pages + 1, shape.groups, PAGE, width)
    pool[..., 2 * shape.dim :] = 0
    table = 1 + torch.randperm(pages, generator=random).view(BATCH, COLUMNS)
    start = torch.randint(0, COLUMNS * PAGE - shape.rows - PAGE, (BATCH,), generator=random)
    fresh = (BATCH, shape.groups, shape.rows, shape.dim)
    query = normal(BATCH, shape.groups * shape.heads, shape.rows, shape.dim)
    return query, normal(*fresh), normal(*fresh), pool, table.int(), start.int()
