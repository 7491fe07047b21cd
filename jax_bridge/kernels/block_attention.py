"""Attention of a drafted block in JAX: on a TPU a Pallas kernel that streams the context past the block."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jaxtyping import Array, Float, Int

from jax_bridge.kernels.halves import Halves
from jax_bridge.kernels.online_softmax import LOWEST, VMEM, SoftmaxRefs, joined
from jax_bridge.kernels.streamed import stream_past
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.block_attention import Past
from torch_dflash.ops.paged_attention import LANES

NAME = "block_attention"
CONTEXT = slice(-3, None)
"""Operands of the kernel's call that hold all slots: keys, values, positions [B, 1, S]."""
BLOCK_KEYS = 512
MOST_ROWS = 64
"""Rows of the widest block for the kernel; a prompt's chunk is compute-bound."""


def block_attention_jax(inputs: AttentionInputs, past: Any, causal: bool) -> Float[Array, "B W Q D"]:
    """`torch_dflash.ops.block_attention`: by platform, the Pallas kernel or a loop in plain jnp.

    The kernel has no sinks, no soft cap, and no tree in a cache of other widths or types than its rows: those
    run the loop everywhere.
    """
    arrays, rule, tree = inputs[:4], {"scale": inputs.scale, "window": inputs.window}, inputs.tree
    same_layout = past.key.shape == past.value.shape and past.key.dtype == inputs.query.dtype
    if inputs.sinks is not None or inputs.softcap is not None or (tree is not None and not same_layout):
        return stream_past(inputs, past, causal)
    kernel = partial(pallas_block_attention, **rule, causal=causal)

    def other(*arrays: Any) -> Any:
        *own, past, tree = arrays
        return stream_past(AttentionInputs(*own, **rule, tree=tree), past, causal)

    return jax.lax.platform_dependent(*arrays, past, tree, tpu=kernel, default=other)


def block_of_cache(inputs: Any, key: Any, value: Any, **how: Any) -> Float[Array, "B M Q D"]:
    """`torch_dflash.ops.attention` of few rows as a causal block: no slot behind them is read.

    ``key``, ``value``: a cache [B, G, S, D] that holds the rows themselves; ``how``: options of the kernel.
    """
    slot = jnp.arange(key.shape[2], dtype=inputs.start.dtype)
    held: Any = jnp.where(slot < inputs.start[:, None], slot, -1)
    rule = {"scale": inputs.scale, "window": inputs.window, "causal": True}
    rows = inputs[:3]
    if (count := inputs.query.shape[2]) == 1:  # Mosaic has no product with a single key in half precision
        rows = [jnp.concatenate([row, row], axis=2) for row in rows]
    out = pallas_block_attention(*rows, inputs.start, past=Past(key, value, held), **rule, **how)
    return out[:, :count]


def slots_read(context: int, slots: int) -> int:
    """Slots that the kernel reads where ``context`` are in use: whole blocks of keys, at most ``slots``."""
    return min(slots, -(-context // BLOCK_KEYS) * BLOCK_KEYS)


def pallas_block_attention(
    query: Float[Array, "B Q W D"],
    key: Float[Array, "B G W D"],
    value: Float[Array, "B G W D"],
    start: Int[Array, " B"],
    past: Any,
    tree: Any = None,
    *,
    scale: float,
    window: int | None,
    causal: bool,
    block_keys: int = BLOCK_KEYS,
    interpret: bool | pltpu.InterpretParams = False,
) -> Float[Array, "B W Q D"]:
    """Calls the kernel; ``past`` is a `torch_dflash.ops.block_attention.Past` of arrays.

    ``tree``: a `torch_dflash.ops.trees.Tree` of arrays, of the W rows; None: each row follows the last.
    ``block_keys``: slots read at once; ``interpret``: run on the CPU, slowly, for tests.
    """
    batch, heads, width, dim = query.shape
    groups, slots = past.key.shape[1:3]
    height, keys = heads // groups * width, min(slots, block_keys)
    halves = Halves.of(batch, groups)
    # XLA keeps heads narrower than a register with their slots in the lanes, so this is no copy.
    turned = dim % LANES != 0
    context = [rows.swapaxes(2, 3) if turned else rows for rows in (past.key, past.value)]
    # Slots behind the last one in use are not read.
    slot = jnp.arange(1, slots + 1, dtype=jnp.int32)
    used = jnp.max(jnp.where(past.position >= 0, slot, 0), axis=1)
    made = jax.ShapeDtypeStruct((batch, groups, height, dim), query.dtype)
    if halves.keys == 2:
        made = jax.ShapeDtypeStruct((batch, 2 * groups, height, LANES + dim), jnp.float32)

    of_tree = () if tree is None else _tree_rows(tree, heads // groups)
    attend = partial(_attend if tree is None else _attend_by_tree, halves, scale, window, causal, slots)
    call = pl.pallas_call(
        partial(attend, turned),
        grid_spec=_grid(halves, (height, width, dim), made.shape[-1], slots, keys, turned, bool(of_tree)),
        out_shape=made,
        compiler_params=pltpu.CompilerParams(
            dimension_semantics=("parallel", "arbitrary", "arbitrary"), vmem_limit_bytes=VMEM
        ),
        cost_estimate=pl.CostEstimate(
            flops=4 * query.size * slots,
            transcendentals=query.size // dim * slots,
            bytes_accessed=2 * past.key.size * past.key.dtype.itemsize,
        ),
        interpret=interpret,
        name=NAME,
    )
    shared = query.reshape(batch, groups, height, dim)
    out = call(start, used, shared, key, value, *of_tree, *context, past.position[:, None])
    out = joined(out, query.dtype) if halves.keys == 2 else out
    return out.reshape(batch, heads, width, dim).transpose(0, 2, 1, 3)


def _tree_rows(tree: Any, heads: int) -> tuple[Array, Array]:
    """(Depths of the query rows [B, heads * W, 1], ends and depths of the block's own keys [B, 2, W])."""
    return jnp.tile(tree.depth, (1, heads))[:, :, None], jnp.stack([tree.end, tree.depth], axis=1)


def _grid(
    halves: Halves,
    sizes: tuple[int, int, int],
    out_width: int,
    slots: int,
    keys: int,
    turned: bool,
    by_tree: bool,
) -> Any:
    """The grid and the blocks of each program; ``sizes``: query rows and new rows of a K/V head, D."""
    (height, width, dim), own = sizes, halves.own

    def of_block(rows: int) -> pl.BlockSpec:
        return pl.BlockSpec((1, own, rows, dim), lambda half, b, step, *_: (*halves.place(half, b), 0, 0))

    def block_index(half, b, step, used):
        block, end = _reach(halves, half, step, used[b], keys)
        return jnp.minimum(block, jax.lax.div(jnp.maximum(end - 1, 0), keys))

    def of_context(half, b, step, start, used):
        b, place = halves.place(half, b)
        at = block_index(half, b, step, used)
        return (b, place, 0, at) if turned else (b, place, at, 0)

    def of_positions(half, b, step, start, used):
        b, _ = halves.place(half, b)
        return b, 0, block_index(half, b, step, used)

    def of_results(half, b, step, start, used):
        return *halves.result(half, b), 0, 0

    def of_sequence(half, b, step, *_):
        return halves.place(half, b)[0], 0, 0

    tree = [pl.BlockSpec((1, height, 1), of_sequence), pl.BlockSpec((1, 2, width), of_sequence)]
    in_blocks = pl.BlockSpec((1, own, dim, keys) if turned else (1, own, keys, dim), of_context)
    return pltpu.PrefetchScalarGridSpec(
        num_scalar_prefetch=2,
        # A chip with two cores takes a half each.
        grid=(*halves.grid, -(-slots // (keys * halves.keys))),
        in_specs=[
            of_block(height),
            of_block(width),
            of_block(width),
            *(tree if by_tree else ()),
            in_blocks,
            in_blocks,
            pl.BlockSpec((1, 1, keys), of_positions),
        ],
        out_specs=pl.BlockSpec((1, own, height, out_width), of_results),
        scratch_shapes=[pltpu.VMEM((own, height, size), jnp.float32) for size in (LANES, LANES, dim)],
    )


def _reach(halves: Halves, half: Any, step: Any, used: Any, keys: int) -> tuple[Any, Any]:
    """(The block of slots at a half's ``step``, the slot that ends the half), with ``used`` slots in use."""
    if halves.keys == 1:
        return step, used
    begin, end = halves.blocks(half, 0, jax.lax.div(used + keys - 1, keys))
    return begin + step, jnp.minimum(end * keys, used)


def _attend_by_tree(
    halves, scale, window, causal, slots, turned, start_ref, used_ref, query, key, value, depth, keys, *rest
):
    given = halves, scale, window, causal, slots, turned, start_ref, used_ref, query, key, value
    _attend(*given, *rest, tree=(depth, keys))


def _attend(
    halves, scale, window, causal, slots, turned, start_ref, used_ref,
    query, key, value, past_key, past_value, position, out, top, total, sums, tree=None,
):  # fmt: skip
    """One half (`Halves`), one sequence, one block of the context's slots.

    Refs: ``query`` [1, own, heads * W, D], a head's rows together; ``key`` and ``value`` [1, own, W, D];
    ``past_key`` and ``past_value`` [1, own, keys, D], ``turned``: [1, own, D, keys], at ``position``
    [1, 1, keys]; ``tree`` as of `_tree_rows`.
    """
    half, b, step = (pl.program_id(axis) for axis in range(3))
    b, running = halves.place(half, b)[0], SoftmaxRefs(top, total, sums)
    own, height, width, keys = query.shape[1], query.shape[2], key.shape[2], position.shape[2]
    row = jax.lax.rem(jax.lax.broadcasted_iota(jnp.int32, (height, 1), 0), width)
    depth = row if tree is None else tree[0][0]

    @pl.when(step == 0)
    def _():
        running.begin(jnp.full((1, 1, 1), LOWEST, jnp.float32))

        @pl.when(halves.has_new(half))
        def _():
            gap = row - jax.lax.broadcasted_iota(jnp.int32, (height, width), 1)
            seen = gap >= 0 if causal else gap == gap
            if tree is not None:
                seen, gap = seen & (row < tree[1][0, 0:1]), depth - tree[1][0, 1:2]
            seen = seen if window is None else seen & (jnp.abs(gap) < window)
            for head in range(own):
                running.add(head, query[0, head], key[0, head], value[0, head], seen, scale)

    block, end = _reach(halves, half, step, used_ref[b], keys)

    @pl.when(block * keys < end)
    def _():
        seen = position[0] >= 0
        if window is not None:
            seen = seen & (start_ref[b] + depth - position[0] < window)
        left = slots - block * keys
        seen = seen & (jax.lax.broadcasted_iota(jnp.int32, (1, keys), 1) < left)
        # Memory behind the last slot may hold NaN, and 0 * NaN is NaN.
        shape = (1, keys) if turned else (keys, 1)
        real = jax.lax.broadcasted_iota(jnp.int32, shape, int(turned)) < left
        for head in range(own):
            rows = past_value[0, head] if slots % keys == 0 else jnp.where(real, past_value[0, head], 0)
            running.add(head, query[0, head], past_key[0, head], rows, seen, scale, turned=turned)

    @pl.when(step == pl.num_programs(2) - 1)
    def _():
        result = running.part if halves.keys == 2 else running.result
        for head in range(own):
            out[0, head] = result(head).astype(out.dtype)
