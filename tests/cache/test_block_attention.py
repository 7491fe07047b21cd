"""A drafted block's attention in all its forms against a definition in float64: torch, lowered, Pallas."""

from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax.experimental.pallas import tpu as pltpu

import jax_bridge as jb
from jax_bridge._torchax import call_torch
from jax_bridge.aot import compile as aot
from jax_bridge.kernels import block_attention as kernel
from jax_bridge.kernels import online_softmax
from torch_dflash.cache.dense import StaticLayer
from torch_dflash.ops.attention import AttentionInputs, dense_attention, visible
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.ops.windows import positions


@dataclass(frozen=True)
class Shape:  # G K/V heads shared by ``heads`` query heads each, W rows, S slots of context
    groups: int = 2
    heads: int = 4
    width: int = 6
    dim: int = 64
    slots: int = 96
    window: int | None = None
    causal: bool = False
    ring: bool = False
    batch: int = 3
    dtype: str = "float32"


CASES = {
    "gqa 4": Shape(),
    "gqa 1, one row": Shape(groups=4, heads=1, width=1),
    "gqa 8, one K/V head, block of 10": Shape(groups=1, heads=8, width=10),
    "head dim 128": Shape(dim=128, width=16, batch=2),
    "slots that are no whole blocks": Shape(slots=83),
    "fewer slots than a block": Shape(slots=20),
    "causal, window": Shape(causal=True, window=7),
    "window, both ways, inside the block too": Shape(window=4, width=10),
    "a ring, window": Shape(ring=True, window=40, slots=51),
    "bfloat16": Shape(dim=128, dtype="bfloat16", batch=2),
}


class Call:  # random arguments: row 0 has no context, others some of the slots; no other may show
    def __init__(self, shape: Shape, seed: int = 0, start: np.ndarray | None = None):
        self.shape, random = shape, np.random.default_rng(seed)

        def normal(*sizes):
            values = random.standard_normal(sizes).astype(np.float32)
            return np.array(jnp.asarray(values, shape.dtype).astype(jnp.float32))

        self.query = normal(shape.batch, shape.groups * shape.heads, shape.width, shape.dim)
        own = (shape.batch, shape.groups, shape.width, shape.dim)
        past = (shape.batch, shape.groups, shape.slots, shape.dim)
        self.key, self.value, self.past_key, self.past_value = (
            normal(*size) for size in (own, own, past, past)
        )
        most = 3 * shape.slots if shape.ring else shape.slots
        self.start = random.integers(shape.slots // 2, most, shape.batch).astype(np.int32)
        self.start[0] = 0
        self.start = self.start if start is None else start
        slot = np.arange(shape.slots)
        if shape.ring:  # the latest position below the start that falls into each slot
            self.position = self.start[:, None] - 1 - (self.start[:, None] - 1 - slot) % shape.slots
        else:
            self.position = np.where(slot < self.start[:, None], slot, -1)
        self.position = np.maximum(self.position, -1).astype(np.int32)
        self.past_key[self.position[:, None, :].repeat(shape.groups, 1) < 0] = 1e4  # stale
        self.scale = shape.dim**-0.5

    def expected(self) -> np.ndarray:
        """[B, W, Q, D], straight from the definition."""
        shape = self.shape
        out = np.zeros((shape.batch, shape.width, self.query.shape[1], shape.dim))
        for b, m, q in np.ndindex(out.shape[:3]):
            group, at = q // shape.heads, int(self.start[b]) + m
            inside = [
                (int(self.start[b]) + n, self.key[b, group, n], self.value[b, group, n])
                for n in range(shape.width)
            ]
            past = zip(
                self.position[b].tolist(), self.past_key[b, group], self.past_value[b, group], strict=True
            )
            seen = [row for row in [*past, *inside] if row[0] >= 0 and self.sees(at, row[0])]
            score = np.array([float(key.astype(np.float64) @ self.query[b, q, m]) for _, key, _ in seen])
            weight = np.exp(score * self.scale)
            out[b, m, q] = weight @ np.stack([value for *_, value in seen]) / weight.sum()
        return out

    def sees(self, at: int, other: int) -> bool:
        if self.shape.causal and other > at:
            return False
        return self.shape.window is None or abs(at - other) < self.shape.window

    @property
    def floats(self):
        return self.query, self.key, self.value, self.past_key, self.past_value

    @property
    def rule(self):
        return {"scale": self.scale, "window": self.shape.window, "causal": self.shape.causal}

    def attend(self, query, key, value, past_key, past_value, position, start):
        inputs = AttentionInputs(query, key, value, start, self.scale, self.shape.window)
        return block_attention(inputs, Past(past_key, past_value, position), self.shape.causal)

    def torch(self) -> np.ndarray:
        kind = getattr(torch, self.shape.dtype)
        tensors = [torch.tensor(array).to(kind) for array in self.floats]
        out = self.attend(*tensors, torch.tensor(self.position), torch.tensor(self.start))
        return out.float().numpy()

    def jax(self, form) -> np.ndarray:
        arrays = [jnp.asarray(array, self.shape.dtype) for array in self.floats]
        out = form(*arrays, jnp.asarray(self.position), jnp.asarray(self.start))
        return np.asarray(out.astype(jnp.float32))


def pallas(call: Call) -> np.ndarray:
    options = {"block_keys": 32, "interpret": pltpu.InterpretParams(uninitialized_memory="nan")}

    def form(query, key, value, past_key, past_value, position, start):
        past = Past(past_key, past_value, position)
        return kernel.pallas_block_attention(query, key, value, start, past, **options, **call.rule)

    return call.jax(form)


FORMS = {"torch": Call.torch, "lowered": lambda call: call.jax(partial(call_torch, call.attend))}
FORMS |= {"pallas": pallas}


def gap(call: Call, form: str) -> float:
    return float(np.abs(FORMS[form](call) - call.expected()).max())


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("case", CASES)
def test_every_form_is_its_definition(case, form):
    call = Call(CASES[case], seed=len(case))
    assert gap(call, form) < (2e-6 if call.shape.dtype == "float32" else 2e-2)


def forgets_some(original, left, right, axis):
    return original(left, right, axis) * 0.99


def test_a_broken_kernel_is_seen(monkeypatch):
    monkeypatch.setattr(online_softmax, "product", partial(forgets_some, online_softmax.product))
    assert gap(Call(Shape(batch=2), seed=1), "pallas") > 1e-3


def step_of(shape: Shape):
    call = Call(shape)
    args = [jax.ShapeDtypeStruct(array.shape, jnp.dtype(shape.dtype)) for array in call.floats]
    args += [jax.ShapeDtypeStruct(array.shape, jnp.int32) for array in (call.position, call.start)]
    return jax.jit(partial(call_torch, call.attend)), args


def test_on_tpu_it_is_one_kernel_and_elsewhere_none():
    step, args = step_of(Shape(dtype="bfloat16"))
    assert jax.export.export(step, platforms=["tpu"])(*args).mlir_module().count("tpu_custom_call") == 1
    assert "custom_call" not in step.lower(*args).as_text()


TPU = {
    "block of 16 of Qwen3-4B's drafter": Shape(8, 4, 16, 128, 4128, batch=1, dtype="bfloat16"),
    "block of 64": Shape(8, 4, 64, 128, 4224, batch=1, dtype="bfloat16"),
    "batch 8, block of 10": Shape(8, 4, 10, 128, 4112, batch=8, dtype="bfloat16"),
    "gpt-oss's, block of 8": Shape(8, 8, 8, 64, 4112, batch=1, dtype="bfloat16"),
    "a ring": Shape(8, 4, 16, 128, 2080, window=2048, ring=True, batch=2, dtype="bfloat16"),
    "float32, odd heads": Shape(3, 3, 16, 64, 8208, batch=2),
}


@pytest.mark.aot
@pytest.mark.parametrize("topology", ["v5p:2x2x1", "v5e:2x2", "v6e:2x2"])
@pytest.mark.parametrize("case", TPU)
def test_the_kernel_compiles_for(topology, case):
    assert_compiles(TPU[case], topology)


def assert_compiles(shape: Shape, topology: str, parts: int = 0) -> None:
    """Asserts one kernel without scores in HBM; ``parts``: bytes of the results of halves of the keys."""
    step, args = step_of(shape)
    compiled = aot.compile_function(lambda *given: step(*given[2:]), (), (), *args, topology=topology)
    assert compiled.hlo.count('custom_call_target="tpu_custom_call"') == 1
    scores = shape.batch * shape.groups * shape.heads * shape.width * shape.slots * 4
    assert compiled.temp_bytes < scores / 8 + parts


@pytest.mark.parametrize("rows, dim, slots, window", [(1, 64, 96, None), (6, 64, 83, 7), (16, 128, 64, None)])
def test_a_few_rows_of_a_static_cache(rows, dim, slots, window):
    """On a TPU the rows are a causal block: the cache holds them, and no position behind them is read."""
    random = np.random.default_rng(0)
    query, key, value = (
        torch.tensor(random.standard_normal((3, heads, rows, dim)), dtype=torch.float32)
        for heads in (8, 2, 2)
    )
    past = torch.tensor(random.standard_normal((2, 3, 2, slots, dim)), dtype=torch.float32)
    start = torch.tensor([0, 17, 32 - rows], dtype=torch.int32)
    inputs = AttentionInputs(query, key, value, start, dim**-0.5, window)
    cache = StaticLayer(*past).write(key, value, start)
    seen = visible(positions(start, rows), torch.arange(slots)[None], window, causal=True)
    wanted = dense_attention(inputs, cache.key, cache.value, seen)
    cache.key[:, :, 32:] = cache.value[:, :, 32:] = torch.nan
    how = {"block_keys": 16, "interpret": True}
    got = kernel.block_of_cache(*jb.to_jax((inputs, cache.key, cache.value)), **how)
    torch.testing.assert_close(jb.to_torch(got), wanted, atol=2e-5, rtol=1e-4)


@pytest.mark.aot
@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize(
    "groups, heads, dim", [(8, 4, 128), (1, 71, 64), (3, 3, 80), (16, 1, 256), (2, 7, 40)]
)
def test_a_few_rows_of_a_static_cache_compile_for_a_tpu(groups, heads, dim, rows):
    shapes = [(2, groups * heads, rows, dim), *[(2, groups, rows, dim)] * 2, *[(2, groups, 1040, dim)] * 2]
    arrays = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]

    def attend(weights, buffers, query, key, value, past_key, past_value, start):
        return kernel.block_of_cache(AttentionInputs(query, key, value, start, 1.0), past_key, past_value)

    start = jax.ShapeDtypeStruct((2,), jnp.int32)
    compiled = aot.compile_function(attend, (), (), *arrays, start, topology="v5e:2x2")
    assert compiled.hlo.count('custom_call_target="tpu_custom_call"') == 1


@pytest.mark.parametrize("limits, calls", [({}, 1), ({"softcap": 2.0}, 0), ({"sinks": True}, 0)])
def test_what_the_kernel_does_not_know_stays_plain_on_a_tpu(limits, calls):
    def attend(*arrays):
        def torches(query, key, value, start, *buffers):
            given = {"sinks": query[0, :, 0, 0]} if "sinks" in limits else limits
            return dense_attention(AttentionInputs(query, key, value, start, 1.0, **given), *buffers)

        return call_torch(torches, *arrays)

    shapes = [(1, 4, 2, 128), (1, 2, 2, 128), (1, 2, 2, 128), (1,), *[(1, 2, 64, 128)] * 2, (1, 1, 2, 64)]
    kinds = [jnp.float32] * 3 + [jnp.int32] + [jnp.float32] * 2 + [jnp.bool_]
    arrays = [jnp.zeros(*given) for given in zip(shapes, kinds, strict=True)]
    text = jax.jit(attend).trace(*arrays).lower(lowering_platforms=("tpu",)).as_text()
    assert text.count("tpu_custom_call") == calls
