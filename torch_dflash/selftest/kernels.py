"""Attention and experts in the form that the device runs, against the plain form in float32 on the CPU."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.ops.paged_attention import Pages, paged_attention, pool_width
from torch_dflash.selftest.backend import Backend
from torch_dflash.selftest.report import Check, within
from torch_dflash.targets.experts import mix_experts

BATCH, PAGE, COLUMNS = 2, 16, 12
SLOTS = 1040  # slots of a drafter's context: two blocks of the kernel and a part of one


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
BLOCKS = {
    "block of 16, GQA 4, head dim 128": Shape(4, 4, 16, 128),
    "block of 10, GQA 8, window 37, head dim 64": Shape(2, 8, 10, 64, {"window": 37}),
    "block of 6, causal, GQA 1": Shape(2, 1, 6, 128, {"causal": True}),
}
TOLERANCES = {torch.float32: 2e-5, torch.bfloat16: 3e-2}


def paged_forms(backend: Backend) -> Iterator[Check]:
    """Yield a check per shape and dtype: of outputs, and of the pages afterwards."""
    for name, shape in SHAPES.items():
        for dtype, tolerance in TOLERANCES.items():
            arguments = _arguments(shape, dtype)
            *_, table, start = arguments
            attention = partial(_paged, shape)
            wanted, kept = attention(*_wide(arguments))
            out, pool = backend.apply(attention, arguments, consumed=(3,))
            written = _difference(pool.float(), kept, table, start + shape.rows)
            error = float((out.float() - wanted).abs().max())
            note = "pages as they should be" if written == 0 else f"pages wrong by {written:.2e}"
            label = f"paged attention, {str(dtype).removeprefix('torch.')}, {name}"
            yield within(label, error if written == 0 else float("inf"), tolerance, note)


def block_forms(backend: Backend) -> Iterator[Check]:
    """Yield a check per shape and dtype of a drafted block's attention."""
    for name, shape in BLOCKS.items():
        for dtype, tolerance in TOLERANCES.items():
            arguments = _block_arguments(shape, dtype)
            attention = partial(_block, shape)
            out = backend.apply(attention, arguments)
            error = float((out.float() - attention(*_wide(arguments))).abs().max())
            label = f"block attention, {str(dtype).removeprefix('torch.')}, {name}"
            yield within(label, error, tolerance)


def expert_forms(backend: Backend) -> Iterator[Check]:
    """Yield a check per dtype of 16 rows of a mixture with 32 experts."""
    for dtype, tolerance in TOLERANCES.items():
        arguments = _expert_arguments(dtype)
        out = backend.apply(_experts, arguments)
        error = float((out.float() - _experts(*_wide(arguments)).float()).abs().max())
        yield within(f"experts, {str(dtype).removeprefix('torch.')}, 16 rows, 4 of 32", error, tolerance)


def _experts(rows, index, weights, up, down) -> Any:
    kind = {"has_gate": True, "has_bias": False, "is_transposed": False, "num_experts": len(down)}
    module = SimpleNamespace(gate_up_proj=up, down_proj=down, act_fn=nn.SiLU(), **kind)
    module._apply_gate = partial(_default_apply_gate, module)
    return mix_experts(rows, index, weights, module)


def _paged(shape: Shape, query, key, value, pool, table, start) -> Any:
    inputs = AttentionInputs(query, key, value, start, shape.dim**-0.5, **shape.options)
    return paged_attention(inputs, Pages(pool, table))


def _block(shape: Shape, query, key, value, past_key, past_value, position, start) -> Any:
    inputs = AttentionInputs(query, key, value, start, shape.dim**-0.5, shape.options.get("window"))
    past = Past(past_key, past_value, position)
    return block_attention(inputs, past, shape.options.get("causal", False))


def _wide(tensors: tuple[torch.Tensor, ...]) -> list[torch.Tensor]:
    """Copies of ``tensors``, with floats in float32."""
    return [tensor.float() if tensor.is_floating_point() else tensor.clone() for tensor in tensors]


def _difference(one: torch.Tensor, other: torch.Tensor, table: torch.Tensor, end: torch.Tensor) -> float:
    """Largest difference of two pools below ``end`` [B]; slots from ``end`` on are stale."""
    rows = ((one - other)[table.long()].abs().amax(dim=(2, 4))).flatten(1)
    return float(rows[torch.arange(rows.shape[1]) < end[:, None]].max())


def _arguments(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, key, value, pool, table and start; pages are out of order, and rows end anywhere."""
    random = torch.Generator().manual_seed(shape.rows)
    normal = partial(_normal, random, dtype)
    pages = BATCH * COLUMNS
    pool = normal(pages + 1, shape.groups, PAGE, pool_width(shape.dim, shape.dim))
    pool[..., 2 * shape.dim :] = 0
    table = 1 + torch.randperm(pages, generator=random).view(BATCH, COLUMNS)
    start = torch.randint(0, COLUMNS * PAGE - shape.rows - PAGE, (BATCH,), generator=random)
    fresh = (BATCH, shape.groups, shape.rows, shape.dim)
    query = normal(BATCH, shape.groups * shape.heads, shape.rows, shape.dim)
    return query, normal(*fresh), normal(*fresh), pool, table.int(), start.int()


def _block_arguments(shape: Shape, dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Query, key, value, the context's key and value, position and start; some slots are unused."""
    random = torch.Generator().manual_seed(shape.rows)
    normal = partial(_normal, random, dtype)
    query = normal(BATCH, shape.groups * shape.heads, shape.rows, shape.dim)
    block, context = ((BATCH, shape.groups, rows, shape.dim) for rows in (shape.rows, SLOTS))
    start = torch.randint(1, SLOTS, (BATCH,), generator=random).int()
    slot = torch.arange(SLOTS, dtype=torch.int32)
    position = torch.where(slot < start[:, None], slot, -1)
    return query, normal(*block), normal(*block), normal(*context), normal(*context), position, start


def _expert_arguments(dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    """Rows, their experts' numbers and weights, and both stacks."""
    normal = partial(_normal, torch.Generator().manual_seed(0), dtype)
    weights, index = normal(16, 32).float().softmax(dim=1).topk(4)
    return normal(16, 256), index.int(), weights, normal(32, 256, 256) / 16, normal(32, 256, 128) / 16


def _normal(random: torch.Generator, dtype: torch.dtype, *sizes: int) -> torch.Tensor:
    return torch.randn(*sizes, generator=random).to(dtype)
