"""Rows that attend to chosen positions alone: the Pallas kernel, interpreted, is the plain form over pages.

Lengths are ragged, choices reach into the rows' own block, and rows may be no whole tile.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_bridge.aot.shapes import find_topology
from jax_bridge.kernels import halves, pallas_body, pallas_paged, row_reductions
from jax_bridge.kernels import paged_attention as paged_kernel
from jax_bridge.kernels.pallas_paged import pallas_paged_attention
from jax_bridge.ops import paged_by_choice_jax
from jax_bridge.programs.lower import tracing
from torch_dflash.ops.attention import AttentionInputs, finite_values, visible
from torch_dflash.ops.paged_attention import Pages, paged_attention, pool_width
from torch_dflash.ops.spread import marked
from torch_dflash.ops.windows import positions

PAGE, COLUMNS, HEADS, CHOSEN = 16, 8, 4, 9
CLOSE = {"atol": 3e-6, "rtol": 1e-5}
ARRAYS = "query", "key", "value", "start", "chosen"


def call(rows: int, starts=(0, 37, 90), shared: bool = True, bad=(), seed: int = 0):
    """(Inputs, pages): each row has chosen `CHOSEN` positions; old keys of the positions ``bad`` are NaN."""
    draw, batch = torch.Generator().manual_seed(seed), len(starts)
    groups, sizes = (1, (24, 8)) if shared else (2, (24, 24))
    value, key = sizes
    width = value + key if shared else key
    start = torch.tensor(starts, dtype=torch.int32)
    table = 1 + torch.randperm(batch * COLUMNS, generator=draw).view(batch, -1).int()
    pool = torch.randn(1 + batch * COLUMNS, groups, PAGE, pool_width(value + key, 0), generator=draw)
    for row, position in bad:
        page = pool[table[row, position // PAGE], :, position % PAGE]
        page[:, slice(value, None) if shared else slice(0, key)] = torch.nan
        page[:, : value if shared else 0] = 0
    pool[0] = torch.nan  # no row's own
    query = torch.randn(batch, HEADS, rows, width, generator=draw)
    fresh = [torch.randn(batch, groups, rows, size, generator=draw) for size in (key, value)]
    scores = torch.randn(batch, rows, COLUMNS * PAGE, generator=draw).round(decimals=1)  # with ties
    at = visible(positions(start, rows), torch.arange(COLUMNS * PAGE)[None], None, causal=True)[:, 0]
    best = scores.masked_fill(~at, -torch.inf).topk(CHOSEN, dim=-1).indices
    chosen = marked(best, COLUMNS * PAGE)[:, None]
    inputs = AttentionInputs(query, *fresh, start, width**-0.5, shared=shared, chosen=chosen)
    return inputs, Pages(pool, table)


def plain(inputs, pages):
    out, pool = paged_attention(inputs, Pages(pages.pool.clone(), pages.table))
    return out.numpy(), pool.numpy()


def kernel(inputs, pages, interpret=True, **how):
    """The kernel on these tensors, 32 keys at a time."""
    arrays = {name: jnp.asarray(getattr(inputs, name).numpy()) for name in ARRAYS}
    interpreted = partial(pallas_paged_attention, interpret=interpret, **how)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(paged_kernel, "BLOCK_KEYS", 32)
        patch.setattr(paged_kernel, "pallas_paged_attention", interpreted)
        given = inputs._replace(**arrays), tuple(jnp.asarray(part.numpy()) for part in pages)
        out, pool = paged_kernel.paged_attention_jax(*given)
    return np.asarray(out), np.asarray(pool)


def gap(inputs, pages, **how) -> float:
    """Largest difference of the outputs; the rows' positions in the pages are equal."""
    (wanted, kept), (out, pool) = plain(inputs, pages), kernel(inputs, pages, **how)
    for start, table in zip(inputs.start.tolist(), pages.table.numpy(), strict=True):
        at = np.arange(start + inputs.query.shape[2])
        place = table[at // PAGE], slice(None), at % PAGE
        np.testing.assert_array_equal(pool[place], kept[place])
    return float(np.abs(out - wanted).max())


@pytest.mark.parametrize("rows", [1, 6, 17])
@pytest.mark.parametrize("shared", [True, False], ids=["latents", "two heads"])
def test_the_kernel_sees_what_is_chosen(rows, shared):
    assert gap(*call(rows, shared=shared, seed=rows)) < 3e-6


def test_rows_in_tiles_are_the_same_rows():
    given = call(24, seed=2)
    assert gap(*given, row_tile=8 * HEADS) < 3e-6
    assert gap(*given, row_tile=3 * HEADS) < 3e-6


@pytest.mark.parametrize("starts", [(16,), (31, 64), (96, 5, 40)])
def test_cores_may_share_the_keys(starts, monkeypatch):
    monkeypatch.setattr(halves, "has_two_cores", lambda: True)
    assert gap(*call(6, starts)) < 3e-6


def test_a_key_that_is_not_finite_reaches_the_rows_that_chose_it():
    inputs, pages = call(6, bad=[(1, 20), (2, 70)], seed=5)
    chosen = inputs.chosen.clone()
    chosen[1, :, ::2, 20] = chosen[2, :, 1, 70] = True
    chosen[1, :, 1::2, 20] = chosen[2, :, 2:, 70] = chosen[2, :, 0, 70] = False
    inputs = inputs._replace(chosen=chosen)
    (wanted, _), (out, _) = plain(inputs, pages), kernel(inputs, pages)
    np.testing.assert_allclose(out, wanted, **CLOSE)
    bad = ~np.isfinite(out).all(axis=(2, 3))
    assert np.argwhere(bad).tolist() == [[1, 0], [1, 2], [1, 4], [2, 1]]


def test_a_new_row_that_is_not_finite_reaches_no_other():
    inputs, pages = call(6, seed=6)
    broken = inputs.value.clone()
    broken[1, :, 4] = torch.nan
    key, value = finite_values(inputs.key, broken)
    chosen = inputs.chosen.clone()
    chosen[1, 0, 4:, 37 + 4] = torch.tensor([True, False])
    inputs = inputs._replace(chosen=chosen)
    (sound, _), (out, _) = kernel(inputs, pages), kernel(inputs._replace(key=key, value=value), pages)
    bad = ~np.isfinite(out).all(axis=(2, 3))
    assert np.argwhere(bad).tolist() == [[1, 4]]
    np.testing.assert_array_equal(out[~bad], sound[~bad])


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
def test_the_kernel_reads_nothing_that_is_being_written(mode):
    watched = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    kernel(*call(16, (0, 37)), interpret=watched)
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found


# --- broken on purpose -------------------------------------------------------------------------------------


def ignored(original, self, row, marks):
    return original(self, row, jnp.ones_like(marks))


def of_the_next_row(original, self, row, marks):
    return original(self, row + 1, marks)


def one_late(original, chosen, *rest):
    return original(jnp.roll(chosen, 1, axis=2), *rest)


def own_ignored(original, chosen, *rest):
    held, own = original(chosen, *rest)
    return held, jnp.ones_like(own)


FAULTS = {
    "the choice ignored": (pallas_body.Choice, "sees", ignored),
    "another row's choice": (pallas_body.Choice, "sees", of_the_next_row),
    "a choice one slot late": (pallas_paged, "_marks", one_late),
    "the choice of new rows ignored": (pallas_paged, "_marks", own_ignored),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_seen(name, monkeypatch):
    owner, part, broken = FAULTS[name]
    original = getattr(owner, part)
    monkeypatch.setattr(owner, part, lambda *args: broken(original, *args))
    assert not gap(*call(6, seed=1)) < 1e-2


# --- marks -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", [1, 40, 128, 300])
@pytest.mark.parametrize("share", [0.3, 1.0])
def test_marks_are_those_of_the_ids(size, share):
    draw = torch.Generator().manual_seed(size)
    count = max(1, int(share * size))
    ids = torch.stack([torch.randperm(size, generator=draw)[:count] for _ in range(6)]).view(2, 3, -1).int()
    wanted = (ids[..., None] == torch.arange(size)).any(dim=2).numpy()
    np.testing.assert_array_equal(marked(ids, size), wanted)
    for form in (row_reductions.mark_by_product, row_reductions.mark_by_scatter):
        np.testing.assert_array_equal(form(jnp.asarray(ids.numpy()), size), wanted)


def test_on_a_tpu_it_is_one_kernel_without_a_scatter():
    inputs, pages = call(16)
    arrays = {name: jnp.asarray(getattr(inputs, name).numpy()) for name in ARRAYS}

    def run(arrays, ids, pool, table):
        chosen = row_reductions.marked_jax(ids, size=COLUMNS * PAGE)[:, None]
        return paged_by_choice_jax(inputs._replace(**arrays, chosen=chosen), (pool, table))

    del arrays["chosen"]
    ids = jnp.zeros((3, 16, CHOSEN), jnp.int32)
    step = jax.jit(run, donate_argnums=2)
    given = arrays, ids, *(jnp.asarray(part.numpy()) for part in pages)
    with tracing("highest"):
        text = jax.export.export(step, platforms=["tpu"])(*given).mlir_module()
        assert "custom_call" not in step.lower(*given).as_text()
    assert text.count("tpu_custom_call") == 1 and "stablehlo.scatter" not in text


TPU = {"block": (16, 1), "a row": (1, 1), "block of 5, batch 2": (5, 2), "prompt chunk": (512, 1)}


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("case", TPU)
def test_the_kernel_compiles_for(topology, case):
    """GLM-5.2's widths: 64 heads over latents of 512 and 64 lanes."""
    (rows, batch), half = TPU[case], jnp.bfloat16
    chip = NamedSharding(Mesh(np.array(find_topology(topology).devices[:1]), ("chip",)), PartitionSpec())

    def shape(*sizes, dtype=half):
        return jax.ShapeDtypeStruct(sizes, dtype, sharding=chip)

    def run(query, key, value, start, chosen, pool, table):
        inputs = AttentionInputs(query, key, value, start, 0.1, shared=True, chosen=chosen)
        return paged_by_choice_jax(inputs, (pool, table))

    rope, latent = shape(batch, 1, rows, 64), shape(batch, 1, rows, 512)
    start, chosen = shape(batch, dtype=jnp.int32), shape(batch, 1, rows, 33 * 128, dtype=bool)
    pool, table = shape(batch * 33 + 1, 1, 128, 640), shape(batch, 33, dtype=jnp.int32)
    given = shape(batch, 64, rows, 576), rope, latent, start, chosen, pool, table
    with tracing("default"):
        lowered = jax.jit(run, donate_argnums=5).trace(*given).lower(lowering_platforms=("tpu",))
    compiled = lowered.compile()
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    assert memory.alias_size_in_bytes >= 2 * 640 * 128 * (batch * 33 + 1)  # the pool is written in place
