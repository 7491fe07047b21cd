"""Caches of latents: a key's first lanes are its value. Every form is a dense layer's with the two apart.

Lanes behind a value may be NaN, pages may be a former occupant's, and rows may be a tree's.
"""

import random
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.tabled import with_path

from jax_bridge._torchax import call_torch
from jax_bridge.kernels import paged_attention as paged_kernel
from jax_bridge.kernels.block_attention import block_of_cache
from jax_bridge.kernels.pallas_paged import pallas_paged_attention
from jax_bridge.programs.lower import tracing
from torch_dflash.cache import view as views
from torch_dflash.cache.allocate import allocate
from torch_dflash.cache.spec import LayerSpec
from torch_dflash.cache.view import CacheView
from torch_dflash.ops import paged_attention as plain_pages
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.trees import read_tree
from torch_dflash.plan import DecodePlan

BATCH, HEADS, WIDTH, DEPTH = 2, 4, 6, 4
FINE, BAD = [0.5], [torch.nan, torch.inf, -torch.inf]
PLAN = {"batch_size": BATCH, "capacity": 64, "block_size": WIDTH, "verify_width": WIDTH, "page_size": 16}
PLANS = {"static": DecodePlan(**PLAN), "paged": DecodePlan(**PLAN, cache="paged")}
TABLE = torch.arange(1, 1 + BATCH * PLANS["paged"].row_pages, dtype=torch.int32).view(BATCH, -1).flip(1)
FORMS = ["static", "paged", "lowered static", "jnp", "pallas"]
WIDTHS = {"16 and 8": (16, 8), "whole registers": (128, 128), "no whole one": (120, 16)}


def rows_of(count: int, seed: int, widths, bad=(), poisons=FINE):
    """(Queries over whole keys, latents, rotated keys); the latents of ``bad`` rows have ``poisons``."""
    generator, (rank, rope) = torch.Generator().manual_seed(seed), widths
    sizes = (HEADS, rank + rope), (1, rank), (1, rope)
    query, latent, turned = (
        torch.randn(BATCH, heads, count, dim, generator=generator) for heads, dim in sizes
    )
    for at, row in enumerate(bad):
        latent[0, 0, row, row % rank] = poisons[at % len(poisons)]
        turned[1, 0, row, 0] = poisons[at % len(poisons)]
    return query, latent, turned


def empty(form: str, widths):
    rank, rope = widths
    cache = "static" if "static" in form else "paged"
    if form == "apart static":
        return allocate(
            LayerSpec("attention", 1, rank + rope, rank, None), PLANS[cache], torch.float32, "cpu"
        )
    layer = allocate(LayerSpec("shared", 1, rank + rope, rank, None), PLANS[cache], torch.float32, "cpu")
    if cache == "paged":  # a former occupant's rows
        layer.pool[1:] = torch.nan
    return layer


def attend(apart, layer, start, table, tree, query, latent, turned):
    """Attention of rows: (output [B, M, Q, R], the layer afterwards)."""
    view = CacheView((layer,), (None,), start, table, tree=tree)
    key = torch.cat([latent, turned], dim=-1) if apart else turned
    inputs = AttentionInputs(query, key, latent, start, query.shape[3] ** -0.5, shared=not apart)
    return view.attend(0, inputs), view.states[0]


together, in_two = partial(attend, False), partial(attend, True)


def committed(layer, count, path):
    return layer.commit(count, path)


@cache
def lowered(form, function):
    """A function compiled by XLA, once for each form: a test changes the code below."""
    return jax.jit(partial(call_torch, function))


def step(form, function, *args):
    if form in ("static", "paged", "apart static"):
        return function(*args)
    arrays = jax.tree.map(lambda leaf: jnp.asarray(np.asarray(leaf)), args)
    with tracing("highest"):
        return lowered(form, function)(*arrays)


def at(position: int):
    return torch.full((BATCH,), position, dtype=torch.int32)


@pytest.fixture
def kernels(request, monkeypatch):
    """Two pages at a time, with the kernel in the place of the CPU's form."""
    monkeypatch.setattr(paged_kernel, "BLOCK_KEYS", 32)
    form = request.getfixturevalue("form")
    if "pallas" in form:
        kernel = partial(pallas_paged_attention, interpret=True)
        monkeypatch.setattr(paged_kernel, "jnp_paged_attention", kernel)

        def of_tree(query, inputs, pages):
            rule = {"k_dim": query.shape[4], "scale": inputs.scale, "block_keys": 32, "shared": RANK[0]}
            fresh = inputs.key
            fresh = jnp.pad(fresh, [(0, 0)] * 3 + [(0, pages[0].shape[3] - fresh.shape[3])])
            return kernel(query, fresh, *pages, inputs.start, None, inputs.tree, **rule)[0]

        monkeypatch.setattr(paged_kernel, "jnp_tree_attention", of_tree)


RANK = [0]


def play(form: str, widths, poisons=FINE, tree: bool = False):
    """Prompts, a block whose later rows are bad and rejected, and rows after it; or a tree and its path."""
    RANK[0] = widths[0]
    layer, out = empty(form, widths), []
    run = in_two if form == "apart static" else together
    for start in (0, 6, 12, 18, 24, 30):
        _, layer = step(form, run, layer, at(start), TABLE, None, *rows_of(WIDTH, start, widths))
    if tree:
        draw = random.Random(0)
        parents = [with_path(WIDTH - 1, DEPTH)([1] * 9, draw)[1] for _ in range(BATCH)]
        node = read_tree(torch.tensor(parents, dtype=torch.int32), at(WIDTH - 1), DEPTH)
        rows = rows_of(WIDTH, 1, widths, [WIDTH - 1], poisons)
        found, layer = step(form, run, layer, at(33), TABLE, node, *rows)
        out.append(np.asarray(found))
        path = torch.tensor([[0, 1, 2, 0, 0]] * BATCH, dtype=torch.int32)
        layer = step(form, committed, layer, at(3), path)
    else:
        rows = rows_of(WIDTH, 1, widths, range(3, WIDTH), poisons)
        found, layer = step(form, run, layer, at(33), TABLE, None, *rows)
        out.append(np.asarray(found))
    found, _ = step(form, run, layer, at(36), TABLE, None, *rows_of(2, 2, widths))
    return [*out, np.asarray(found)]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("widths", WIDTHS.values(), ids=WIDTHS)
@pytest.mark.parametrize("tree", [False, True], ids=["chain", "tree"])
def test_every_form_is_attention_with_values_apart(form, widths, tree, kernels):
    wanted = play("apart static", widths, tree=tree)
    for one, other in zip(play(form, widths, tree=tree), wanted, strict=True):
        np.testing.assert_allclose(one, other, atol=3e-6, rtol=1e-5)


@pytest.mark.parametrize("form", FORMS)
def test_a_rejected_row_changes_no_bit_of_others(form, kernels):
    wanted, after = play(form, (16, 8))
    block, second = play(form, (16, 8), BAD)
    assert np.isfinite(wanted).all() and np.isfinite(after).all()
    assert np.array_equal(block[:, :3], wanted[:, :3]) and np.array_equal(second, after)
    assert not np.isfinite(block[:, 3:]).any()


@pytest.mark.parametrize("form", ["static", "paged"])
def test_nan_in_the_lanes_of_a_value_is_seen(form, monkeypatch):
    """Broken on purpose: rows are kept as they come."""
    monkeypatch.setattr(views, "finite_values", lambda key, value: (key, value))
    assert not np.isfinite(play(form, (16, 8), BAD)[0][:, :3]).all()


def test_pages_of_a_former_occupant_are_seen(monkeypatch):
    """Broken on purpose: what lies behind a row's end is multiplied by a weight of zero."""
    where = torch.where

    def kept(condition, rows, other):
        return rows if type(other) is int and other == 0 and rows.ndim == 4 else where(condition, rows, other)

    assert np.isfinite(play("paged", (16, 8))[1]).all()
    monkeypatch.setattr(plain_pages.torch, "where", kept)
    assert not np.isfinite(play("paged", (16, 8))[1]).all()


@pytest.mark.parametrize("rows", [1, WIDTH])
def test_the_dense_kernel_reads_values_where_keys_lie(rows):
    """The kernel of static buffers on a TPU, in the interpreter."""
    widths = 16, 8
    layer, apart = empty("static", widths), empty("apart static", widths)
    for start in (0, 6, 12):
        given = rows_of(WIDTH, start, widths)
        layer = attend(False, layer, at(start), None, None, *given)[1]
        apart = attend(True, apart, at(start), None, None, *given)[1]
    query, latent, turned = rows_of(rows, 3, widths)
    wanted, _ = attend(True, apart, at(18), None, None, query, latent, turned)
    _, layer = attend(False, layer, at(18), None, None, query, latent, turned)
    whole = torch.cat([latent, turned], dim=-1)
    inputs = AttentionInputs(query, whole, whole, at(18), 24**-0.5)
    arrays = jax.tree.map(
        lambda leaf: jnp.asarray(np.asarray(leaf)) if hasattr(leaf, "shape") else leaf, inputs
    )
    held = jnp.asarray(layer.key.numpy())
    out = block_of_cache(arrays, held, held, interpret=True, block_keys=16)[..., :16]
    np.testing.assert_allclose(np.asarray(out), wanted.numpy(), atol=3e-6, rtol=1e-5)
