"""Attention and row writes on a slice: each chip has whole heads and runs the one-chip form on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.sharding import PartitionSpec

from jax_bridge.mesh.current import WHOLE, P, Slice
from jax_bridge.mesh.shape import ALL
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.block_attention import Past
from torch_dflash.ops.paged_attention import Pages

ARRAYS = ("query", "key", "value", "start", "sinks", "tree", "chosen")
"""The fields of `AttentionInputs` that hold arrays."""


def paged_on_slice(own: Slice, attend: Callable, inputs: Any, pages: Any) -> Any:
    """`attend(inputs, pages)` of `torch_dflash.ops.paged_attention`."""
    arrays, given, made = _split(own, inputs)

    def local(arrays: tuple, pool: Any, table: Any) -> Any:
        return attend(_joined(inputs, arrays), Pages(pool, table))

    groups = given[1]
    return own.on_parts(local, (given, groups, WHOLE), (made, groups))(arrays, *pages)


def block_on_slice(own: Slice, attend: Callable, inputs: Any, past: Any) -> Any:
    """`attend(inputs, past)` of `torch_dflash.ops.block_attention`."""
    arrays, given, made = _split(own, inputs)

    def local(arrays: tuple, *past: Any) -> Any:
        return attend(_joined(inputs, arrays), Past(*past))

    return own.on_parts(local, (given, given[1], given[1], WHOLE), made)(arrays, *past)


def dense_on_slice(own: Slice, attend: Callable, arrays: tuple, key: Any, value: Any, mask: Any) -> Any:
    """`attend` of `jax_bridge.ops.dense_attention_jax`: ``arrays`` are query, key, value, start, sinks."""
    given, made = _specs(own, *arrays[:2])
    return own.on_parts(attend, (given, given[1], given[1], WHOLE), made)(arrays, key, value, mask)


def append_on_slice(own: Slice, append: Callable, key: Any, value: Any, start: Any, pages: Any) -> Any:
    """`append(key, value, start, pages)` of `torch_dflash.ops.paged_attention.append_pages`."""
    group = own.heads(key.shape[1])[1]

    def local(key: Any, value: Any, start: Any, *pages: Any) -> Any:
        return append(key, value, start, Pages(*pages))

    given = (group, group, WHOLE, group, WHOLE)
    return own.on_parts(local, given, group)(key, value, start, *pages)


def write_on_slice(own: Slice, write: Callable, buffer: Any, rows: Any, start: Any, count: Any) -> Any:
    """`write` of `torch_dflash.ops.windows.write_rows`: caches are cut by heads, other buffers are whole."""
    spec = own.heads(buffer.shape[1])[1] if buffer.ndim == 4 else WHOLE
    return own.on_parts(write, (spec, spec, WHOLE, WHOLE), spec)(buffer, rows, start, count)


def by_head_on_slice(own: Slice, multiply: Callable, rows: Any, stack: Any) -> Any:
    """`multiply(rows, stack)` of `torch_dflash.ops.latents.by_head`."""
    heads = P(None, ALL) if own.latents else WHOLE
    return own.on_parts(multiply, (heads, P(ALL) if own.latents else WHOLE), heads)(rows, stack)


def _specs(own: Slice, query: Any, key: Any) -> tuple[tuple[PartitionSpec, ...], PartitionSpec]:
    """Specs of (query, key, value, start, sinks), and of the output [B, M, Q, Dv]."""
    query, group = own.heads(key.shape[1], query.shape[1])
    cut = query != WHOLE
    return (query, group, group, WHOLE, P(ALL) if cut else WHOLE), P(None, None, ALL) if cut else WHOLE


def _split(own: Slice, inputs: Any) -> tuple[tuple, tuple[PartitionSpec, ...], PartitionSpec]:
    """The arrays of `AttentionInputs`, their specs, and the output's."""
    given, made = _specs(own, inputs.query, inputs.key)
    return tuple(getattr(inputs, name) for name in ARRAYS), (*given, WHOLE, WHOLE), made


def _joined(inputs: Any, arrays: tuple) -> AttentionInputs:
    return AttentionInputs(*inputs)._replace(**dict(zip(ARRAYS, arrays, strict=True)))
