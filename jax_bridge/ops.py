"""The JAX lowering of every operation in `torch_dflash.ops`."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Array, Int

from jax_bridge._torchax import call_jax, call_torch, environment, once
from jax_bridge.kernels.block_attention import MOST_ROWS, block_attention_jax, block_of_cache
from jax_bridge.kernels.hit_experts import MOST_ROWS as MOST_OF_EXPERTS
from jax_bridge.kernels.hit_experts import hit_experts_jax, loop_over_hits
from jax_bridge.kernels.paged_attention import append_pages_jax, paged_attention_jax
from jax_bridge.kernels.row_reductions import (
    argmax_jax,
    cos_jax,
    layer_norm_jax,
    marked_jax,
    mean_jax,
    sin_jax,
    softmax_jax,
    spread_jax,
)
from jax_bridge.kernels.streamed import stream_dense
from jax_bridge.mesh.best import argmax_on_slice, likeliest_on_slice, slice_under, topk_on_slice
from jax_bridge.mesh.current import current
from jax_bridge.mesh.cut import Cut
from jax_bridge.mesh.experts import experts_on_slice
from jax_bridge.mesh.heads import (
    append_on_slice,
    block_on_slice,
    by_head_on_slice,
    dense_on_slice,
    paged_on_slice,
    write_on_slice,
)
from jax_bridge.mesh.mixers import absorb_on_slice, mixer_on_slice
from jax_bridge.mesh.products import partitioned_linear, partitioned_stacked_linear, partitioned_stacked_sum
from jax_bridge.weights.codes import Groups, Scaled, reads_prompts
from jax_bridge.weights.formats import Halved, Multiplier, Readable, Transposed, name_of, stored_as
from jax_bridge.weights.products import layer_of, linear_jax, stacked_linear_jax
from torch_dflash.cache.recurrent import absorb
from torch_dflash.ops.attention import (
    AttentionInputs,
    KeyValue,
    dense_attention,
    finite_values,
    grouped_attention,
)
from torch_dflash.ops.block_attention import block_attention
from torch_dflash.ops.control_flow import branch, chunked, on_host, repeat
from torch_dflash.ops.latents import by_head, halves, pays_to_expand
from torch_dflash.ops.paged_attention import Pages, append_pages, paged_attention
from torch_dflash.ops.spread import likeliest, marked, spread, stacked_linear, stacked_sum
from torch_dflash.ops.windows import put_slot, take_slot, write_rows
from torch_dflash.targets.experts import apply_experts, gates_by_columns, mix_experts, ordinary
from torch_dflash.targets.scans import run_mixer

UNROLLED_ROWS = 8


def write_rows_jax(
    buffer: Array, rows: Array, start: Int[Array, " B"], count: Int[Array, " B"] | None, dim: int
) -> Array:
    """One ``dynamic_update_slice`` per batch row (`torch_dflash.ops.windows.write_rows`).

    Not a vmap: JAX batches ``dynamic_update_slice`` into a scatter, which TPUs run element by element.
    """
    rows = rows.astype(buffer.dtype)

    def write_one(row: Array, buffer: Array) -> Array:
        at = [jnp.int32(0)] * buffer.ndim
        at[0], at[dim] = jnp.int32(row), start[row].astype(jnp.int32)
        new = jax.lax.dynamic_slice_in_dim(rows, row, 1, axis=0)
        if count is not None:
            # Read at the clamped place of the write: rows beyond ``count`` are written back unchanged.
            old = jax.lax.dynamic_slice(buffer, at, new.shape)
            step = jax.lax.broadcasted_iota(jnp.int32, new.shape, dim)
            new = jnp.where(step < count[row], new, old)
        return jax.lax.dynamic_update_slice(buffer, new, at)

    return jax.lax.fori_loop(0, buffer.shape[0], write_one, buffer, unroll=UNROLLED_ROWS)


def _write_rows(buffer, rows, start, dim, count=None):
    write = partial(once, write_rows_jax, dim=dim)
    return call_jax(_on_slice(write_on_slice, write), buffer, rows, start, count)


def _take_slot(buffer, row):
    return call_jax(partial(jax.lax.dynamic_slice_in_dim, slice_size=1), buffer, row)


def _put_slot(buffer, part, row):
    def put(buffer, part, row):
        return jax.lax.dynamic_update_slice_in_dim(buffer, part.astype(buffer.dtype), row, axis=0)

    return call_jax(put, buffer, part, row)


def _on_slice(spread: Callable, function: Callable) -> Callable:
    """``function``, or ``spread`` of it on a slice."""
    own = current()
    return function if own is None else partial(spread, own, function)


def finite_values_jax(key, value):
    """`torch_dflash.ops.attention.finite_values`."""
    return call_torch(finite_values.plain, key, value)


def _finite_values(key, value):
    return call_jax(partial(once, finite_values_jax), key, value)


def grouped_attention_jax(query, parts, sinks, *, blocks, scale, softcap):
    """`torch_dflash.ops.attention.grouped_attention`; ``parts`` as (key, value, mask), with ``blocks``."""
    parts = [KeyValue(*part, blocks=count) for part, count in zip(parts, blocks, strict=True)]
    return call_torch(grouped_attention.plain, query, parts, scale, sinks, softcap)


def _grouped_attention(query, parts, scale, sinks=None, softcap=None):
    blocks = tuple(part.blocks for part in parts)
    attend = partial(once, grouped_attention_jax, blocks=blocks, scale=scale, softcap=softcap)
    return call_jax(attend, query, [tuple(part[:3]) for part in parts], sinks)


def dense_attention_jax(inputs, key, value, mask, *, scale, window, softcap, chosen):
    """`torch_dflash.ops.attention`; ``inputs``: query, key, value, start and sinks.

    ``chosen``: whether ``mask`` hides more than the rule does, which only the plain form reads.
    """
    query, sinks = inputs[0], inputs[-1]
    rule: Any = {"scale": scale, "window": window, "softcap": softcap}

    def inputs_of(inputs):
        return AttentionInputs(*inputs[:-1], sinks=inputs[-1], **rule)

    def plain(inputs, key, value, mask):
        return call_torch(dense_attention.plain, inputs_of(inputs), key, value, mask)

    def streamed(inputs, key, value, mask):
        return stream_dense(inputs_of(inputs), key, value)

    def kernel(inputs, key, value, mask):
        return block_of_cache(inputs_of(inputs), key, value)

    if chosen:
        return plain(inputs, key, value, mask)
    few = query.shape[2] <= MOST_ROWS and sinks is None and softcap is None
    known = few and key.shape == value.shape and key.dtype == query.dtype
    return jax.lax.platform_dependent(
        inputs, key, value, mask, tpu=kernel if known else plain, default=streamed
    )


def _dense_attention(inputs, key, value, mask):
    rule = {"scale": inputs.scale, "window": inputs.window, "softcap": inputs.softcap}
    rule["chosen"] = inputs.chosen is not None
    attend = partial(once, dense_attention_jax, **rule)
    arrays = (inputs.query, inputs.key, inputs.value, inputs.start, inputs.sinks)
    return call_jax(_on_slice(dense_on_slice, attend), arrays, key, value, mask)


def _linear(input, weight, bias=None):  # torch's own names: some callers pass them
    def multiply(rows, weight, bias):
        kept = stored_as(weight)
        if isinstance(kept, Cut):
            return once(partitioned_linear, rows, kept, bias)
        return once(linear_jax, rows, kept if isinstance(kept, Multiplier | Transposed) else weight, bias)

    return call_jax(multiply, input, weight, bias)


def _stacked_linear(rows, stack, transposed, at=None):
    def multiply(rows, stack, at):
        kept = stored_as(stack)
        if isinstance(kept, Groups):
            return once(Groups.products, kept if at is None else kept.one(at), rows)
        if at is None and isinstance(kept, Cut):
            return once(partitioned_stacked_linear, rows, kept, transposed=transposed)
        stack = stack if at is None else layer_of(stack, at)
        return once(stacked_linear_jax, rows, stack, transposed=transposed)

    return call_jax(multiply, rows, stack, at)


def _mix_experts(rows, index, weights, module):
    if reads_prompts() and rows.shape[0] > MOST_OF_EXPERTS:
        with environment():  # products and sums of experts are lowered, too
            return mix_experts.plain(rows, index, weights, module)
    return _on_slice(experts_on_slice, _mix_hits)(rows, index, weights, module)


def _mix_hits(rows, index, weights, module, chips=1):
    stacks = (module.gate_up_proj if module.has_gate else module.up_proj), module.down_proj
    apply = partial(call_torch, partial(apply_experts, module))
    if not ordinary(module) or any(stored_as(stack.jax()) is not None for stack in stacks):
        loop = partial(loop_over_hits, experts=module.num_experts, apply=apply, chips=chips)
        return call_jax(loop, rows, index, weights)
    gate = partial(call_torch, module._apply_gate if module.has_gate else module.act_fn)
    by_columns = gates_by_columns(module)
    mix = partial(hit_experts_jax, gate=gate, by_columns=by_columns, apply=apply, chips=chips)
    return call_jax(mix, rows, index, weights, *stacks)


def _halves(weight, widths):
    def part(weight):
        kept = stored_as(weight)
        return (kept.up, kept.down) if isinstance(kept, Halved) else call_torch(halves.plain, weight, widths)

    return call_jax(part, weight)


def _pays_to_expand(query, widths):
    return False


def _by_head(rows, stack, transposed):
    multiply = partial(call_torch, partial(by_head.plain, transposed=transposed))
    return call_jax(_on_slice(by_head_on_slice, multiply), rows, stack)


def _stacked_sum(stack, dtype):
    own = current()
    if own is None or stack.shape[0] % own.mesh.size:
        return stacked_sum.plain(stack, dtype)
    return call_jax(partial(partitioned_stacked_sum, own, dtype=jnp.dtype(name_of(dtype))), stack)


_embedding_of_torchax = environment()._ops[torch.ops.aten.embedding].func


def _embedding(weight, ids, *how, **named):
    def look_up(weight, ids):
        kept = stored_as(weight)
        table = kept.table if isinstance(kept, Multiplier) and not isinstance(kept, Scaled) else kept
        if isinstance(table, Readable | Cut | Scaled):
            return table.look_up(ids)
        return _embedding_of_torchax(weight, ids, *how, **named)

    return call_jax(look_up, weight, ids)


def _angles_of(operation: Any, function: Callable) -> Callable:
    own = environment()._ops[operation].func

    def apply(angles):
        return call_jax(lambda array: function(array) if _is_real(array) else own(array), angles)

    return apply


def _is_real(array: Array) -> bool:
    return jnp.issubdtype(array.dtype, jnp.floating)


def _mean(rows, dim=None, keepdim=False, *, dtype=None):
    cast = rows if dtype is None else rows.to(dtype)
    dim = tuple(dim) if isinstance(dim, list) else dim
    return call_jax(partial(once, mean_jax, dim=dim, keepdim=keepdim), cast)


def _argmax(rows, dim=None, keepdim=False):
    def find(rows):
        if own := slice_under(rows, dim):
            return argmax_on_slice(own, rows, keepdim)
        return once(argmax_jax, rows, dim=dim, keepdim=keepdim)

    return call_jax(find, rows)


_topk_of_torchax = environment()._ops[torch.ops.aten.topk].func


def _topk(rows, k, dim=-1, largest=True, sorted=True):
    def find(rows):
        if largest and (own := slice_under(rows, dim)):
            return topk_on_slice(own, rows, k)
        if largest and rows.ndim and dim in (-1, rows.ndim - 1):
            # In order as it is: torchax sorts it again, and gathers the indices one by one.
            return tuple(jax.lax.top_k(rows, k))
        return _topk_of_torchax(rows, k, dim, largest, sorted)

    return call_jax(find, rows)


def _likeliest(logits, scale, most):
    def find(rows, scale):
        if own := slice_under(rows, -1):
            return likeliest_on_slice(own, rows, scale, most)
        return call_torch(likeliest.plain, rows, scale, most)

    return call_jax(find, logits, scale)


def _softmax(rows, dim, *_):
    return call_jax(partial(once, softmax_jax, dim=dim), rows)


_layer_norm_of_torchax = environment()._ops[torch.ops.aten.native_layer_norm].func


def _layer_norm(rows, shape, weight=None, bias=None, eps=1e-5):
    if len(shape) != 1:
        return call_jax(_layer_norm_of_torchax, rows, shape, weight, bias, eps)
    return call_jax(partial(once, layer_norm_jax, eps=eps), rows, weight, bias)


def _append_pages(key, value, start, pages):
    return call_jax(_on_slice(append_on_slice, append_pages_jax), key, value, start, pages)


def paged_by_choice_jax(inputs, pages):
    """`torch_dflash.ops.paged_attention` of chosen positions: the kernel, or the plain form."""
    names = "query", "key", "value", "start", "sinks", "chosen"
    arrays = {name: getattr(inputs, name) for name in names}

    def plain(arrays, pages):
        out, pool = call_torch(paged_attention.plain, inputs._replace(**arrays), Pages(*pages))
        return out.astype(arrays["query"].dtype), pool

    def kernel(arrays, pages):
        return paged_attention_jax(inputs._replace(**arrays), pages)

    return jax.lax.platform_dependent(arrays, tuple(pages), tpu=kernel, default=plain)


def _paged_attention(inputs, pages):
    attend = paged_attention_jax if inputs.chosen is None else paged_by_choice_jax
    return call_jax(_on_slice(paged_on_slice, attend), inputs, pages)


def _block_attention(inputs, past, causal):
    return call_jax(_on_slice(block_on_slice, partial(block_attention_jax, causal=causal)), inputs, past)


def _spread(ids, values, size):
    return call_jax(partial(once, spread_jax, size=size), ids, values)


def _marked(ids, size):
    return call_jax(partial(once, marked_jax, size=size), ids)


def _branch(condition, then, otherwise, *operands):
    return call_jax(jax.lax.cond, condition, then, otherwise, *operands)


def _repeat(step, trips, *carried):
    def loop(step: Callable, *carried: Any) -> tuple:
        return jax.lax.fori_loop(0, trips, lambda number, carried: tuple(step(number, *carried)), carried)

    return call_jax(loop, step, *carried)


def chunked_jax(step: Callable, size: int, *rows: Array) -> tuple[Array, ...]:
    """A device-side loop over chunks of at most ``size`` rows (`torch_dflash.ops.control_flow.chunked`).

    All chunks have one shape, as a scan needs: the last is padded with zeros, and its results are cut off, so
    padding has no gradient. Inner values are recomputed in the backward pass; torch computes gradients in the
    forward instead. Both are valid because the step's rows are independent.
    """
    count = rows[0].shape[0]
    chunks = max(1, -(-count // size))
    size = -(-count // chunks)

    def cut(rows: Array) -> Array:
        padding = [(0, chunks * size - count)] + [(0, 0)] * (rows.ndim - 1)
        return jnp.pad(rows, padding).reshape(chunks, size, *rows.shape[1:])

    # A scan keeps XLA from merging the recomputation with the first pass; no barrier is needed for that.
    recomputed = jax.checkpoint(step, prevent_cse=False)
    pieces = jax.lax.map(lambda piece: recomputed(*piece), tuple(map(cut, rows)))
    return tuple(piece.reshape(chunks * size, *piece.shape[2:])[:count] for piece in pieces)


def _chunked(step, size, *rows, recompute=False):  # which it always does
    return call_jax(chunked_jax, step, size, *rows)


def _on_host(*given, function, shape):
    def ask(*arrays):
        return function(*map(np.asarray, arrays))

    return call_jax(partial(jax.pure_callback, ask, jax.ShapeDtypeStruct(shape, jnp.int32)), *given)


def _run_mixer(tensors, module, forward, args, kwargs):
    own = current()
    with environment():
        if own is None:
            return run_mixer.plain(tensors, module, forward, args, kwargs)
        return mixer_on_slice(own, module, forward, args, kwargs)


def _absorb(count, fresh, path):
    return call_jax(_on_slice(absorb_on_slice, partial(call_torch, absorb.plain)), count, fresh, path)


LOWERED = {
    write_rows: _write_rows,
    take_slot: _take_slot,
    put_slot: _put_slot,
    finite_values: _finite_values,
    grouped_attention: _grouped_attention,
    dense_attention: _dense_attention,
    paged_attention: _paged_attention,
    append_pages: _append_pages,
    block_attention: _block_attention,
    likeliest: _likeliest,
    marked: _marked,
    spread: _spread,
    on_host: _on_host,
    stacked_linear: _stacked_linear,
    mix_experts: _mix_experts,
    stacked_sum: _stacked_sum,
    halves: _halves,
    by_head: _by_head,
    pays_to_expand: _pays_to_expand,
    branch: _branch,
    repeat: _repeat,
    chunked: _chunked,
    run_mixer: _run_mixer,
    absorb: _absorb,
}
"""The lowering of each of `torch_dflash.ops.lowerable.OPERATIONS`."""

for _operation, _lowering in LOWERED.items():
    environment().override_op_definition(_operation, _lowering)

environment().override_op_definition(F.linear, _linear)
environment().override_op_definition(torch.ops.aten.embedding, _embedding)
environment().override_op_definition(torch.ops.aten.cos, _angles_of(torch.ops.aten.cos, cos_jax))
environment().override_op_definition(torch.ops.aten.sin, _angles_of(torch.ops.aten.sin, sin_jax))
environment().override_op_definition(torch.ops.aten.mean, _mean)
environment().override_op_definition(torch.ops.aten.argmax, _argmax)
environment().override_op_definition(torch.ops.aten.topk, _topk)
environment().override_op_definition(torch.ops.aten._softmax, _softmax)
environment().override_op_definition(torch.ops.aten.native_layer_norm, _layer_norm)
