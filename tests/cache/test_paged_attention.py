"""Paged attention in all its forms against a definition in float32: torch, jnp, and the Pallas kernel."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jax_bridge.aot import compile as aot
from jax_bridge.kernels import online_softmax, pallas_body
from jax_bridge.kernels.paged_attention import jnp_paged_attention, paged_attention_jax
from jax_bridge.kernels.pallas_paged import pallas_paged_attention
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.paged_attention import LANES, Pages, paged_attention


@dataclass(frozen=True)
class Shape:  # a call: G K/V heads shared by ``heads`` query heads each, M rows, pages of ``page`` positions
    groups: int = 2
    heads: int = 4
    rows: int = 6
    dim: int = 64
    page: int = 16
    columns: int = 8
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    batch: int = 3
    dtype: str = "float32"


CASES = {
    "gqa 4": Shape(),
    "gqa 1, one row": Shape(groups=4, heads=1, rows=1),
    "gqa 8, one K/V head, block of 10": Shape(groups=1, heads=8, rows=10),
    "head dim 128": Shape(dim=128, rows=16, batch=2),
    "window, sinks, soft cap": Shape(window=7, sinks=True, softcap=5.0),
    "window over pages, sinks": Shape(window=40, sinks=True, dim=128, batch=2),
    "prompt chunk in tiles": Shape(rows=32, page=32, batch=2),
    "bfloat16": Shape(dim=128, dtype="bfloat16", batch=2),
}


@dataclass
class Call:  # random arguments in float32: pages out of order, rows that end within a page or tile
    shape: Shape
    seed: int = 0

    def __post_init__(self):
        shape, random = self.shape, np.random.default_rng(self.seed)
        width = -(-2 * shape.dim // LANES) * LANES
        pages = shape.batch * shape.columns

        def normal(*sizes):
            values = random.standard_normal(sizes).astype(np.float32)
            return np.asarray(jnp.asarray(values, shape.dtype).astype(jnp.float32))

        self.query = normal(shape.batch, shape.groups * shape.heads, shape.rows, shape.dim)
        self.key, self.value = (normal(shape.batch, shape.groups, shape.rows, shape.dim) for _ in range(2))
        self.pool = normal(pages + 1, shape.groups, shape.page, width)
        self.table = (1 + random.permutation(pages)).reshape(shape.batch, -1).astype(np.int32)
        most = shape.columns * shape.page - shape.rows
        self.start = random.integers(0, most, shape.batch).astype(np.int32)
        self.start[0] = 0
        self.sinks = normal(shape.groups * shape.heads) if shape.sinks else None
        self.scale = shape.dim**-0.5

    def rows_of(self, pool, b):
        """The written K and V of row b [S, G, KV]."""
        end, page = int(self.start[b]) + self.shape.rows, self.shape.page
        return np.stack([pool[self.table[b, p // page], :, p % page] for p in range(end)])

    def expected(self) -> tuple[np.ndarray, list[np.ndarray]]:
        """Output [B, M, Q, Dv] and the `rows_of` afterwards, straight from the definition."""
        shape, pool = self.shape, self.pool.copy()
        out = np.zeros((shape.batch, shape.rows, self.query.shape[1], shape.dim), np.float64)
        for b, start in enumerate(self.start.tolist()):
            for m in range(shape.rows):
                place = pool[self.table[b, (start + m) // shape.page], :, (start + m) % shape.page]
                place[:, : shape.dim], place[:, shape.dim : 2 * shape.dim] = (
                    self.key[b, :, m],
                    self.value[b, :, m],
                )
                place[:, 2 * shape.dim :] = 0
            kv = self.rows_of(pool, b).astype(np.float64)
            for m in range(shape.rows):
                first = 0 if shape.window is None else max(0, start + m - shape.window + 1)
                seen = slice(first, start + m + 1)
                for q in range(self.query.shape[1]):
                    rows = kv[seen, q // shape.heads]
                    score = rows[:, : shape.dim] @ self.query[b, q, m] * self.scale
                    if shape.softcap:
                        score = shape.softcap * np.tanh(score / shape.softcap)
                    weight = np.exp(score)
                    whole = weight.sum() + (np.exp(self.sinks[q]) if shape.sinks else 0)
                    out[b, m, q] = weight @ rows[:, shape.dim : 2 * shape.dim] / whole
        return out, [self.rows_of(pool, b) for b in range(shape.batch)]

    def jax(self, form):
        """``form`` on these arguments: (output [B, M, Q, Dv], pool), in float32."""
        shape = self.shape
        kind = jnp.dtype(shape.dtype)
        grouped = self.query.reshape(shape.batch, shape.groups, shape.heads, shape.rows, shape.dim)
        fresh = np.concatenate([self.key, self.value], -1)
        fresh = np.pad(fresh, [(0, 0)] * 3 + [(0, self.pool.shape[3] - 2 * shape.dim)])
        sinks = None if self.sinks is None else jnp.asarray(self.sinks.reshape(shape.groups, -1))
        table = np.pad(self.table, ((0, 0), (0, 4)))  # as `paged_attention_jax` pads it
        arrays = [jnp.asarray(array, kind) for array in (grouped, fresh, self.pool)]
        static = {"k_dim": shape.dim, "scale": self.scale, "window": shape.window, "softcap": shape.softcap}
        out, pool = form(*arrays, jnp.asarray(table), jnp.asarray(self.start), sinks, block_keys=32, **static)
        out = np.asarray(out.astype(jnp.float32))[..., : shape.dim]
        out = out.reshape(shape.batch, -1, shape.rows, shape.dim).transpose(0, 2, 1, 3)
        return out, np.asarray(pool.astype(jnp.float32))

    def torch(self):
        kind = getattr(torch, self.shape.dtype)
        arrays = (self.query, self.key, self.value, self.pool)
        tensors = [torch.tensor(array).to(kind) for array in arrays]
        sinks = None if self.sinks is None else torch.tensor(self.sinks)
        query, key, value, pool = tensors
        rule = self.scale, self.shape.window, sinks, self.shape.softcap
        inputs = AttentionInputs(query, key, value, torch.tensor(self.start), *rule)
        out, pool = paged_attention(inputs, Pages(pool, torch.tensor(self.table)))
        return out.float().numpy(), pool.float().numpy()


pallas = partial(pallas_paged_attention, interpret=pltpu.InterpretParams())
FORMS = {"torch": lambda call: call.torch(), "jnp": lambda call: call.jax(jnp_paged_attention)}
FORMS |= {"pallas": lambda call: call.jax(pallas)}


def gaps(call: Call, form: str) -> tuple[float, float]:
    """Largest differences from the definition: of the output, and of the pages afterwards."""
    out, pool = FORMS[form](call)
    wanted, kept = call.expected()
    written = (np.abs(call.rows_of(pool, b) - rows).max() for b, rows in enumerate(kept))
    return float(np.abs(out - wanted).max()), float(max(written))


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_form_is_its_definition(case, form):
    call = Call(CASES[case], seed=len(case))
    output, written = gaps(call, form)
    # Written rows are moved, not computed. bfloat16 results are rounded to 8 bits.
    assert written == 0
    assert output < (2e-6 if call.shape.dtype == "float32" else 2e-2)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", ["gqa 4", "head dim 128", "window, sinks, soft cap"])
def test_nothing_comes_from_what_is_not_the_rows_own(case, form):
    call = Call(CASES[case], seed=2)
    wanted = call.expected()[0]
    foreign = np.full_like(call.pool, np.nan)
    for b, start in enumerate(call.start.tolist()):
        for p in range(start):
            place = call.table[b, p // call.shape.page], slice(None), p % call.shape.page
            foreign[place] = call.pool[place]
    call.pool = foreign
    assert np.isnan(foreign[0]).all()
    assert np.abs(FORMS[form](call)[0] - wanted).max() < 2e-6


@pytest.mark.parametrize("mode", ["on_wait", "eager"])
@pytest.mark.parametrize("case", ["gqa 4", "window over pages, sinks", "prompt chunk in tiles"])
def test_the_kernel_reads_nothing_that_is_being_written(case, mode):
    call = Call(CASES[case], seed=5)
    watched = pltpu.InterpretParams(detect_races=True, dma_execution_mode=mode)
    call.jax(partial(pallas_paged_attention, interpret=watched, row_tile=32))
    assert interpret_pallas_call.races is not None and not interpret_pallas_call.races.races_found


@pytest.mark.parametrize("form", ["pallas", "jnp"])
def test_rows_in_tiles_are_the_same_rows(form):
    call = Call(Shape(rows=32, page=32, batch=2, window=9), seed=3)
    form = partial(pallas, row_tile=32) if form == "pallas" else jnp_paged_attention
    assert np.abs(call.jax(form)[0] - call.expected()[0]).max() < 2e-6


def sees_one_too_many(original, kind, query, running, at, *rest):
    original(kind, query, running, at + 1, *rest)


def loses_old_rows(original, kind, staged, fresh, inside):
    original(kind, staged, fresh, inside)
    row = jax.lax.broadcasted_iota(jnp.int32, staged.shape, 1)
    staged[...] = jnp.where(row < inside, 0, staged[...])


def forgets_some(original, left, right, axis):
    return original(left, right, axis) * 0.99


BROKEN = {"_attend": (pallas_body, sees_one_too_many), "_merge": (pallas_body, loses_old_rows)}
BROKEN |= {"product": (online_softmax, forgets_some)}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_seen(name, monkeypatch):
    module, broken = BROKEN[name]
    monkeypatch.setattr(module, name, partial(broken, getattr(module, name)))
    assert max(gaps(Call(Shape(batch=2), seed=1), "pallas")) > 1e-3


def step_of(shape: Shape):
    """Returns the call of a round and the shapes of the arguments; the pool is donated."""
    call, dtype = Call(shape), jnp.dtype(shape.dtype)
    sizes = (call.query.shape, call.key.shape, call.value.shape, call.pool.shape)
    args = [jax.ShapeDtypeStruct(size, dtype) for size in sizes]
    args += [jax.ShapeDtypeStruct(array.shape, jnp.int32) for array in (call.table, call.start)]
    args += [jax.ShapeDtypeStruct(call.sinks.shape, jnp.float32)] if shape.sinks else []

    def run(query, key, value, pool, table, start, sinks=None):
        rule = call.scale, shape.window, sinks, shape.softcap
        return paged_attention_jax(AttentionInputs(query, key, value, start, *rule), Pages(pool, table))

    return jax.jit(run, donate_argnums=3), args


def test_on_tpu_it_is_one_kernel_and_elsewhere_none():
    step, args = step_of(Shape(dtype="bfloat16"))
    kernels = jax.export.export(step, platforms=["tpu"])(*args).mlir_module().count("tpu_custom_call")
    assert kernels == 1
    assert "custom_call" not in step.lower(*args).as_text()


TPU = {
    "verify 16 of Qwen3-4B": Shape(8, 4, 16, 128, 64, 66, batch=1, dtype="bfloat16"),
    "verify 64": Shape(8, 4, 64, 128, 64, 66, batch=1, dtype="bfloat16"),
    "one row": Shape(8, 4, 1, 128, 64, 66, batch=1, dtype="bfloat16"),
    "batch 8, block of 10": Shape(8, 4, 10, 128, 64, 66, batch=8, dtype="bfloat16"),
    "prompt chunk": Shape(8, 4, 512, 128, 64, 66, batch=1, dtype="bfloat16"),
    "gpt-oss, window": Shape(8, 8, 16, 64, 64, 66, window=128, sinks=True, batch=2, dtype="bfloat16"),
    "soft cap, float32": Shape(4, 2, 16, 128, 16, 66, softcap=30.0, batch=1),
    "odd heads, small pages": Shape(3, 3, 8, 64, 16, 20, batch=2, dtype="bfloat16"),
}


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("case", TPU)
def test_the_kernel_compiles_for(topology, case):
    assert_compiles(TPU[case], topology)


def assert_compiles(shape: Shape, topology: str, parts: int = 0) -> None:
    """Asserts one kernel that leaves the pool in place; ``parts``: bytes of the results of key halves."""
    step, args = step_of(shape)
    chip = NamedSharding(Mesh(np.array(aot.find_topology(topology).devices[:1]), ("chip",)), PartitionSpec())
    args = [jax.ShapeDtypeStruct(arg.shape, arg.dtype, sharding=chip) for arg in args]
    compiled = step.trace(*args).lower(lowering_platforms=("tpu",)).compile()
    text = compiled.as_text()
    assert text.count('custom_call_target="tpu_custom_call"') == 1
    width = -(-2 * shape.dim // LANES) * LANES
    pages = (shape.batch * shape.columns + 1) * shape.groups * shape.page * width
    size = pages * jnp.dtype(shape.dtype).itemsize
    memory = compiled.memory_analysis()
    assert memory.alias_size_in_bytes >= size  # the pool is written in place
    assert memory.temp_size_in_bytes < size + parts  # and never copied
