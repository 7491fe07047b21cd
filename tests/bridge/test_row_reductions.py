"""Row reductions do not depend on other rows, and all forms of a reduction agree."""

import re
from collections.abc import Iterable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from support.arithmetic import ARITHMETIC
from support.lowered import lowered
from support.tiny import make_drafter, make_pair, make_target

import jax_bridge as jb
import torch_dflash as td
from jax_bridge import ops
from jax_bridge.kernels import row_reductions as argmax
from jax_bridge.kernels import row_reductions as steady
from jax_bridge.kernels import streamed
from jax_bridge.kernels.row_reductions import FEW_IDS, spread_by_comparing, spread_by_scatter, spread_jax
from jax_bridge.programs import lower
from jax_bridge.weights.formats import dot
from jax_bridge.weights.products import stacked_sums
from torch_dflash.decode import verify
from torch_dflash.ops.spread import spread
from torch_dflash.state import Draft

NORMS = {
    "mean": lambda x: x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-5),
    "softmax": lambda x: torch.softmax(x, dim=-1),
    "layer norm": lambda x: F.layer_norm(x, x.shape[-1:], eps=1e-5),
}


@pytest.mark.parametrize("size", [1, 7, 64, 128, 576, 1000])
def test_halves_are_the_sum(size):
    rows = torch.randn(3, 5, size)
    got = jb.to_torch(steady.pairwise_sum(jb.to_jax(rows)))
    torch.testing.assert_close(got.double(), rows.double().sum(-1, keepdim=True), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("norm", "size"),
    [("mean", 64), ("mean", 576), ("layer norm", 64), ("layer norm", 576), ("softmax", 8), ("softmax", 64)],
)
def test_a_row_alone_is_what_it_is_among_others(norm, size, dtype):
    rows = torch.randn(1, 8, size, dtype=dtype)
    whole = lowered(NORMS[norm], rows)
    for count in range(1, 8):
        assert torch.equal(lowered(NORMS[norm], rows[:, :count]), whole[:, :count])
    tolerance: Any = {"atol": 1e-6, "rtol": 1e-5} if dtype == torch.float32 else {"atol": 0.02, "rtol": 0.01}
    torch.testing.assert_close(whole, NORMS[norm](rows), **tolerance)


@pytest.mark.parametrize("shape", [(4, 6), (6,), ()])
@pytest.mark.parametrize("norm", ["mean", "softmax"])
def test_other_axes_are_those_of_torch(norm, shape):
    rows = torch.randn(shape)
    for dim in range(len(shape)) if shape else [0]:
        function = partial(torch.mean if norm == "mean" else torch.softmax, dim=dim)
        torch.testing.assert_close(lowered(function, rows), function(rows))
    torch.testing.assert_close(lowered(torch.mean, rows), rows.mean())


@pytest.mark.parametrize("norm", NORMS)
def test_rows_of_nothing_are_those_of_torch(norm):
    for shape in ((3, 0), (0, 4)):
        assert lowered(NORMS[norm], torch.zeros(shape)).shape == NORMS[norm](torch.zeros(shape)).shape
    assert lowered(partial(torch.mean, dim=-1), torch.zeros(3, 0)).isnan().all()


def test_an_axis_that_is_not_there_is_refused():
    for function in (torch.mean, torch.softmax):
        with pytest.raises((ValueError, IndexError), match="out of"):
            lowered(partial(function, dim=7), torch.zeros(3, 4))


def test_a_half_precision_softmax_is_rounded_once():
    rows = torch.randn(50, 1024, dtype=torch.bfloat16)
    exact = torch.softmax(rows.double(), dim=-1)
    got = lowered(NORMS["softmax"], rows).double()
    assert ((got - exact) / exact).abs().max() < 2**-8  # half a step, and a little


def test_gradients_are_those_of_a_sum():
    rows = jnp.asarray(np.random.default_rng(0).standard_normal((3, 10)), jnp.float32)
    np.testing.assert_array_equal(
        jax.grad(lambda x: steady.row_sum(x * 2).sum())(rows), jnp.full((3, 10), 2.0)
    )


def drawn(*shape: int, dtype: str = "float32") -> jax.Array:
    return jnp.asarray(torch.randn(shape).numpy(), dtype)


COUNTS = (1, 2, 3, 5, 7, 8, 15, 17, 33)
"""Numbers of rows, compared with 64 in the sums: rounding to bfloat16 would hide most differences."""


@pytest.mark.parametrize(
    ("out", "size"), [(1000, 8), (1, 33), (1, 576), (3, 576), (1000, 100), (1000, 576), (100, 1536)]
)
def test_a_product_of_a_row_is_what_it_is_among_others(out, size):
    rows, weight = drawn(64, size, dtype="bfloat16"), drawn(out, size, dtype="bfloat16")
    product = jax.jit(partial(dot, sums=jnp.float32))
    whole = product(rows, weight)
    for count in COUNTS:
        np.testing.assert_array_equal(product(rows[:count], weight), whole[:count])


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize(("out", "size"), [(100, 8), (100, 64), (100, 100), (3, 100)])
def test_an_expert_s_product_of_a_row_is_what_it_is_among_others(out, size, transposed):
    rows, stack = drawn(4, 64, size, dtype="bfloat16"), drawn(4, out, size, dtype="bfloat16")
    stack = stack.swapaxes(1, 2) if transposed else stack
    product = jax.jit(partial(stacked_sums, transposed=transposed))
    whole = product(rows, stack)
    for count in COUNTS:
        np.testing.assert_array_equal(product(rows[:, :count], stack), whole[:, :count])


@pytest.mark.parametrize("dim", [16, 64, 128])
@pytest.mark.parametrize("heads", [1, 3, 4, 7, 8])
def test_attention_of_a_row_is_what_it_is_among_others(heads, dim):
    attention_is_steady(range(1, 16), heads, dim, 2, "float32")


@pytest.mark.parametrize(("heads", "dim", "groups"), [(1, 16, 2), (1, 64, 1), (3, 16, 3), (1, 128, 3)])
def test_so_it_is_in_half_precision(heads, dim, groups):
    attention_is_steady((1, 2, 3, 5, 15), heads, dim, groups, "bfloat16")


def attention_is_steady(counts: Iterable[int], heads: int, dim: int, groups: int, dtype: str) -> None:
    key, value = (drawn(1, groups, 128, dim, dtype=dtype) for _ in range(2))
    query = drawn(1, groups, heads, 16, dim, dtype=dtype)

    @jax.jit  # everything is an argument: XLA would fold constants in another order
    def attend(query, key, value):
        seen = jnp.ones((1, query.shape[3], 128), bool)
        state = streamed.SoftmaxState.begin(query, dim)
        return state.add(query, streamed.Block(key, value, seen), 0.125).result()

    whole = attend(query, key, value)
    for count in counts:
        some = attend(query[:, :, :, :count], key, value)
        np.testing.assert_array_equal(some, whole[:, :, :, :count])


def test_a_block_of_keys_is_as_long_for_a_step_as_for_a_round():
    def keys(rows: int, batch: int = 1) -> int:
        return streamed.fitting_keys(jnp.zeros((batch, 2, 4, rows, 64)), 64)

    assert len({keys(rows, batch) for rows in (1, 2, 8, 32) for batch in (1, 16, 64)}) == 1


def float_sums() -> int:
    """Counts reductions that add floats over an axis in the compiled rounds of a pair."""
    engine = td.compile(*(model.bfloat16() for model in make_pair("llama")), max_length=64, filters=False)
    runtime: Any = engine.runtime
    params = runtime.refresh(engine.tensors())
    state = runtime.import_state(params, engine.start(torch.tensor([[1, 2, 3]]), max_new_tokens=4))
    with lower.tracing("highest"):
        rounds = runtime._rounds[engine.plan.verify_width]
        text = jax.jit(rounds, donate_argnums=1).lower(params, state).as_text()
    return len(re.findall(r"stablehlo.reduce\([^\n]*stablehlo.add[^\n]*tensor<[^>]*(?:f32|bf16)>", text))


def test_no_round_has_another_sum(monkeypatch):
    assert float_sums() == 0
    monkeypatch.setattr(steady, "pairwise_sum", lambda rows: rows.sum(axis=-1, keepdims=True))
    assert float_sums() > 0


@pytest.mark.parametrize("case", ARITHMETIC)
def test_a_plain_round_rounds_as_a_wide_one(case):
    dtype, options = ARITHMETIC[case]
    target = make_target("llama", head_dim=64).to(getattr(torch, dtype))
    engine = td.compile(target, td.NGramProposer(6), max_length=64, filters=False, **options)
    runtime: Any = engine.runtime
    params = runtime.refresh(engine.tensors())
    state = runtime.import_state(params, engine.start(torch.tensor([[1, 2, 3, 4, 5]]), max_new_tokens=9))

    def logits(width: int) -> np.ndarray:
        def step(pair, state):
            drafted = Draft(state.tokens[:, 1:6], torch.zeros_like(state.length))
            return verify(pair, state, drafted, width, runtime.fewest_rows).logits[:, :1].float()

        with lower.tracing("highest"):
            lowered = lower.lower(lambda params, state: engine.pair.run(step, params, state))
            return np.asarray(jax.jit(lowered)(params, state))

    whole = logits(6)
    for width in (1, 2, 4):
        np.testing.assert_array_equal(logits(width), whole)


SIZES = [1, 255, 256, 257, 512, 1000, 49_152, 50_257]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int32])
@pytest.mark.parametrize("size", SIZES)
def test_it_is_torch_s(size, dtype):
    rows = (torch.randn(2, 3, size) * 50).to(dtype)  # bfloat16 and integers have many equal entries
    for keepdim in (False, True):
        wanted = torch.argmax(rows, dim=-1, keepdim=keepdim)
        got = lowered(partial(torch.argmax, dim=-1, keepdim=keepdim), rows)
        assert got.shape == wanted.shape and torch.equal(got.long(), wanted)


@pytest.mark.parametrize("size", SIZES[2:])
def test_odd_rows_are_torch_s(size):
    rows = torch.randn(7, size)
    rows[0] = 1.0
    rows[1] = -torch.inf
    rows[2, [size // 3, size // 2]] = torch.nan
    rows[3, size // 2] = torch.inf
    rows[4, [0, size - 1]] = 99.0
    rows[5, size - 1] = 99.0
    rows[6] = torch.nan
    found = argmax.argmax_by_blocks(jb.to_jax(rows))
    assert found.tolist() == torch.argmax(rows, dim=-1).tolist()


@pytest.mark.parametrize("dim", [None, 0, 1, -1, -2])
def test_other_axes_are_torch_s(dim):
    rows = torch.randn(3, 600)
    assert torch.equal(lowered(partial(torch.argmax, dim=dim), rows).long(), torch.argmax(rows, dim=dim))
    assert lowered(torch.argmax, torch.tensor(4.0)).item() == 0


def slow_searches(vocabulary: int) -> int:
    """Searches of a whole vocabulary for place and value at once, in the compiled round of a pair."""
    target = make_target("llama", vocab_size=vocabulary)
    engine = td.compile(target, make_drafter(target), max_length=64, filters=False)
    runtime: Any = engine.runtime
    params = runtime.refresh(engine.tensors())
    state = runtime.import_state(params, engine.start(torch.tensor([[1, 2, 3]]), max_new_tokens=4))
    with lower.tracing("highest"):
        rounds = jax.jit(runtime._rounds[engine.plan.verify_width]).lower(params, state, jnp.int32(1))
    text = rounds.compile().as_text() or ""
    whole = set(re.findall(rf"(%[\w.-]+) = f32\[[\d,]*\b{vocabulary}\]", text))
    searched = re.findall(r"= \(f32\[[^=]*\) reduce\((%[\w.-]+)", text)
    return sum(name in whole for name in searched)


def test_no_round_searches_place_and_value_at_once(monkeypatch):
    assert slow_searches(1024) == 0
    monkeypatch.setattr(ops, "argmax_jax", lambda rows, dim, keepdim: jnp.argmax(rows, dim))
    assert slow_searches(1024) > 0


SIZE = 50


@pytest.mark.parametrize("dtype", [torch.int32, torch.float32])
@pytest.mark.parametrize("form", [spread_by_comparing, spread_by_scatter])
def test_every_form_is_the_plain_one(form, dtype):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, SIZE, (2, 3, 40), generator=generator, dtype=torch.int32)  # some twice
    values = torch.randint(-4, 5, ids.shape, generator=generator).to(dtype)
    if dtype == torch.float32:
        values[0, 0, 0] = -torch.inf
    want = spread(ids, values, SIZE)
    assert (want != 0).any() and want.shape == (2, 3, SIZE)
    found = form(jnp.asarray(ids.numpy()), jnp.asarray(values.numpy()), size=SIZE)
    assert found.dtype == want.numpy().dtype and np.array_equal(found, want)


@pytest.mark.parametrize("count, scatters", [(FEW_IDS, False), (FEW_IDS + 1, True)])
def test_few_ids_are_compared_on_a_tpu(count, scatters):
    ids, values = jnp.zeros((1, 2, count), jnp.int32), jnp.zeros((1, 2, count))
    traced = jax.jit(lambda *given: spread_jax(*given, size=SIZE)).trace(ids, values)
    text = traced.lower(lowering_platforms=("tpu",)).as_text()
    assert ("stablehlo.scatter" in text) == scatters


@pytest.mark.parametrize("largest", [True, False])
@pytest.mark.parametrize("dim", [-1, 0])
def test_the_k_largest_or_smallest_are_torchs(largest, dim):
    rows = torch.randperm(120, generator=torch.Generator().manual_seed(1)).view(8, 15).float()
    got = lowered(lambda x: tuple(torch.topk(x, 3, dim=dim, largest=largest)), rows)
    for one, other in zip(got, torch.topk(rows, 3, dim=dim, largest=largest), strict=True):
        torch.testing.assert_close(one.long(), other.long())
    tied = lowered(lambda x: tuple(torch.topk(x, 2, largest=largest)), torch.ones(4, 6))
    assert tied[1].tolist() == [[0, 1]] * 4  # the lowest places first
