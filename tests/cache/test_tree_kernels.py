"""The Pallas kernels on a tree's rows, in the interpreter, against the torch and the jnp forms."""

import random
from functools import cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu
from support.tabled import with_path

import jax_bridge as jb
from jax_bridge.aot import compile as aot
from jax_bridge.kernels import block_attention as blocks
from jax_bridge.kernels import pallas_body, pallas_paged
from jax_bridge.kernels.block_attention import block_attention_jax, pallas_block_attention
from jax_bridge.kernels.paged_attention import paged_attention_jax
from jax_bridge.kernels.pallas_paged import pallas_paged_attention
from torch_dflash.ops.attention import AttentionInputs, finite_values
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.ops.paged_attention import Pages, paged_attention
from torch_dflash.ops.trees import Tree, read_tree

GROUPS, HEADS, ROWS, DIM, PAGE, COLUMNS, DEPTH = 2, 2, 16, 64, 16, 6, 6
WATCHED = pltpu.InterpretParams(uninitialized_memory="nan")


class Call:  # two ragged sequences with a tree each; the values of one leaf of each are NaN
    def __init__(self, window=None, softcap=None, sinks=False):
        draw, drawn = random.Random(0), np.random.default_rng(0)
        parents = [with_path(ROWS - 1, DEPTH)([1] * 9, draw)[1] for _ in range(2)]
        self.tree = read_tree(ints(parents), ints([ROWS - 1, 9]), DEPTH)

        def normal(*sizes):
            return torch.tensor(drawn.standard_normal(sizes), dtype=torch.float32)

        query, key, value = (normal(2, heads, ROWS, DIM) for heads in (GROUPS * HEADS, GROUPS, GROUPS))
        leaf = next(row for row in range(ROWS - 1, 0, -1) if self.tree.depth[0, row] > 1)
        value[:, :, leaf] = torch.nan
        key, value = finite_values(key, value)
        self.start = ints([37, 64])
        cap = normal(GROUPS * HEADS) if sinks else None
        self.inputs = AttentionInputs(
            query, key, value, self.start, DIM**-0.5, window, cap, softcap, self.tree
        )
        self.pool = normal(2 * COLUMNS + 1, GROUPS, PAGE, 2 * DIM)
        self.table = ints((1 + drawn.permutation(2 * COLUMNS)).reshape(2, -1))
        slot = torch.arange(COLUMNS * PAGE, dtype=torch.int32)
        past = normal(2, 2, GROUPS, COLUMNS * PAGE, DIM)
        self.past = Past(past[0], past[1], torch.where(slot < self.start[:, None], slot, -1))

    @cached_property
    def arrays(self):
        return jb.to_jax(self.inputs)

    def paged(self, **how):
        own = self.arrays
        fresh = jnp.concatenate([own.key, own.value], -1)
        table = jnp.pad(jb.to_jax(self.table), ((0, 0), (0, 2)))
        sinks = None if own.sinks is None else own.sinks.reshape(GROUPS, -1)
        rule = {"scale": own.scale, "window": own.window, "softcap": own.softcap}
        grouped = own.query.reshape(2, GROUPS, HEADS, ROWS, DIM)
        given = grouped, fresh, jb.to_jax(self.pool), table, own.start, sinks, own.tree
        how = {"k_dim": DIM, "block_keys": 16, "interpret": WATCHED} | rule | how
        out, pool = pallas_paged_attention(*given, **how)
        assert pool is given[2]  # nothing is written
        return out.reshape(2, -1, ROWS, DIM).transpose(0, 2, 1, 3)

    def block(self):
        own, past = self.arrays, Past(*jb.to_jax(tuple(self.past)))
        rule = {"scale": own.scale, "window": own.window, "causal": True, "block_keys": 32}
        return pallas_block_attention(*own[:4], past, own.tree, **rule, interpret=WATCHED)

    def gap(self, found, dense=False):
        """Largest difference from the torch form; both are NaN at the same places."""
        pages = Pages(self.pool.clone(), self.table)
        wanted = block_attention(self.inputs, self.past, True) if dense else None
        wanted = paged_attention(self.inputs, pages)[0] if wanted is None else wanted
        found, wanted = np.asarray(found), wanted.numpy()
        nothing = np.isnan(wanted)
        assert 0 < nothing.mean() < 0.2 and (np.isnan(found) == nothing).all()
        return float(np.nanmax(np.abs(found - wanted)))


def ints(values):
    return torch.tensor(np.asarray(values), dtype=torch.int32)


CASES = {"plain": {}, "window in tiles": {"window": 9}, "sinks, soft cap": {"softcap": 5.0, "sinks": True}}
CASES["window in tiles"] |= {"row_tile": HEADS * ROWS // 4}


@pytest.mark.parametrize("case", CASES)
def test_rows_of_a_tree_on_pages(case):
    how = dict(CASES[case])
    tiled = {"row_tile": how.pop("row_tile")} if "row_tile" in how else {}
    call = Call(**how)
    assert call.gap(call.paged(**tiled)) < 2e-6
    out, _ = paged_attention_jax(call.arrays, Pages(*jb.to_jax((call.pool, call.table))))
    assert call.gap(out) < 2e-6


@pytest.mark.parametrize("window", [None, 9])
def test_rows_of_a_tree_on_dense_buffers(window):
    call = Call(window=window)
    assert call.gap(call.block(), dense=True) < 2e-6
    past = Past(*jb.to_jax(tuple(call.past)))
    assert call.gap(block_attention_jax(call.arrays, past, True), dense=True) < 2e-6


def seen_sibling(original, tree, *rest):
    return original(tree._replace(end=jnp.full_like(tree.end, ROWS)), *rest)


def by_row(original, tree, *rest):
    return original(tree._replace(depth=jnp.broadcast_to(jnp.arange(ROWS), tree.depth.shape)), *rest)


BROKEN = {
    "a visible sibling": (pallas_paged, "_tree_rows", seen_sibling),
    "window by row": (pallas_paged, "_tree_rows", by_row),
    "first page by the tile's row": (pallas_body, "_nearest", lambda original, start, offset: offset),
    "a visible sibling, dense": (blocks, "_tree_rows", seen_sibling),
    "window by row, dense": (blocks, "_tree_rows", by_row),
}


@pytest.mark.parametrize("kind", BROKEN)
def test_a_broken_kernel_is_seen(kind, monkeypatch):
    module, name, broken = BROKEN[kind]
    monkeypatch.setattr(module, name, partial(broken, getattr(module, name)))
    call = Call(window=9)
    dense = kind.endswith("dense")
    try:
        found = call.gap(call.block() if dense else call.paged(row_tile=HEADS * ROWS // 4), dense)
    except AssertionError:  # a NaN leaf reaches others
        return
    assert found > 1e-2


def step_of(kind, batch, groups, heads, rows, dim, window=None):
    whole, half = jnp.int32, jnp.bfloat16
    sizes = [(batch, groups * heads, rows, dim), *[(batch, groups, rows, dim)] * 2]
    shapes = [jax.ShapeDtypeStruct(size, half) for size in sizes]
    ends = [(batch,), (batch, rows), (batch, rows), (batch,)]
    held = {
        "paged": [((batch * 66 + 1, groups, 64, 2 * max(dim, 64)), half), ((batch, 66), whole)],
        "dense": [*[((batch, groups, 4224, dim), half)] * 2, ((batch, 4224), whole)],
    }[kind]
    shapes += [jax.ShapeDtypeStruct(*one) for one in [*((end, whole) for end in ends), *held]]

    def attend(query, key, value, start, depth, end, valid, *held):
        tree = Tree(depth, end, valid)
        inputs = AttentionInputs(query, key, value, start, 1.0, window, tree=tree)
        if kind == "paged":
            return paged_attention_jax(inputs, Pages(*held))[0]
        return block_attention_jax(inputs, Past(*held), True)

    return attend, shapes


@pytest.mark.parametrize("kind", ["paged", "dense"])
def test_on_tpu_a_tree_is_one_kernel(kind):
    step, shapes = step_of(kind, 1, 8, 4, 16, 128)
    text = jax.export.export(jax.jit(step), platforms=["tpu"])(*shapes).mlir_module()
    assert text.count("tpu_custom_call") == 1 and "scatter" not in text


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("kind", ["paged", "dense"])
@pytest.mark.parametrize("sizes", [(1, 8, 4, 64, 128), (2, 8, 8, 16, 64, 32), (1, 3, 3, 8, 64)])
def test_the_kernels_of_trees_compile_for(topology, kind, sizes):
    step, shapes = step_of(kind, *sizes)
    compiled = aot.compile_function(lambda *given: step(*given[2:]), (), (), *shapes, topology=topology)
    assert compiled.hlo.count('custom_call_target="tpu_custom_call"') == 1
