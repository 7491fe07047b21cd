"""Experts that are hit, each read once: the kernel in jax's interpreter, and the loop of other devices."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from jax._src.pallas.mosaic.interpret import interpret_pallas_call as interpreter
from jax.experimental.pallas import tpu as pltpu
from support.experts import Experts
from support.experts import routed as routed_rows
from torch.func import functional_call
from transformers.integrations.moe import batched_mm_experts_forward

import jax_bridge as jb
from jax_bridge import ops
from jax_bridge._torchax import call_torch
from jax_bridge.kernels import hit_experts
from jax_bridge.kernels.hit_experts import (
    NAME,
    expected_hits,
    hit_experts_jax,
    hits_of,
    loop_over_hits,
    most_rows,
    pallas_hit_experts,
    routes_of,
)
from jax_bridge.programs.lower import EXACT, tracing
from jax_bridge.weights.codes import reading_prompts
from jax_bridge.weights.products import stacked_linear_jax

COUNT, CHOSEN, HIDDEN, INNER = 128, 8, 16, 8
POISON = pltpu.InterpretParams(uninitialized_memory="nan")


def gate(inner):
    first, second = jnp.split(inner, 2, axis=-1)
    return jax.nn.silu(first) * second


def experts(dtype=np.float32, inner=INNER, hidden=HIDDEN, count=COUNT):
    rng = np.random.default_rng(0)
    up, down = rng.standard_normal((count, 2 * inner, hidden)), rng.standard_normal((count, hidden, inner))
    return jnp.asarray(up, dtype), jnp.asarray(down, dtype)


def routed(rows, dtype=np.float32, hidden=HIDDEN, count=COUNT, chosen=CHOSEN):
    rng = np.random.default_rng(rows)
    index = np.stack([rng.choice(count, chosen, replace=False) for _ in range(rows)]).astype(np.int32)
    share = rng.random((rows, chosen)).astype(np.float32)
    return jnp.asarray(rng.standard_normal((rows, hidden)), dtype), jnp.asarray(index), jnp.asarray(share)


def wanted(rows, index, share, up, down):
    """The definition, in float64."""
    out = np.zeros(rows.shape)
    for row, (chosen, shares) in enumerate(
        zip(np.asarray(index), np.asarray(share, np.float64), strict=True)
    ):
        for expert, part in zip(chosen, shares, strict=True):
            inner = np.asarray(up[expert], np.float64) @ np.asarray(rows[row], np.float64)
            first, second = np.split(inner, 2)
            out[row] += part * (
                np.asarray(down[expert], np.float64) @ (first / (1 + np.exp(-first)) * second)
            )
    return out


def by_kernel(rows, index, share, up, down, **how):
    routes = routes_of(index, share, len(up))
    how = {"gate": gate, "chosen": index.shape[1], "interpret": POISON} | how
    return pallas_hit_experts(rows, routes, up, down, **how)


def applying(up, down):
    def apply(rows, at):
        own = [jax.lax.dynamic_slice_in_dim(stack, at[0], 1) for stack in (up, down)]
        inner = gate(stacked_linear_jax(rows, own[0], transposed=False))
        return stacked_linear_jax(inner, own[1], transposed=False)

    return apply


@jax.jit
def by_loop(rows, index, share, up, down):
    return loop_over_hits(rows, index, share, experts=len(up), apply=applying(up, down))


@pytest.fixture
def copies(monkeypatch):
    """(Operand, block) of each copy from HBM that the interpreted kernel makes."""
    found, real = [], interpreter.get

    def get(*args, input_name=None, **more):
        if input_name is not None:
            found.append((input_name, tuple(map(int, args[6]))))
        return real(*args, input_name=input_name, **more)

    monkeypatch.setattr(interpreter, "get", get)
    return found


@pytest.mark.parametrize("rows", [1, 2, 16, 21])
def test_each_hit_expert_is_copied_once(rows, copies):
    given, stacks = routed(rows), experts()
    hit = sorted(set(np.asarray(given[1]).ravel().tolist()))
    got = by_kernel(*given, *stacks)
    for name in "up", "down":
        read = [block[0] for operand, block in copies if operand == name]
        assert read == hit, name  # one copy each, in their order, and none of another
    np.testing.assert_allclose(got, wanted(*given, *stacks), rtol=1e-5, atol=1e-4)
    np.testing.assert_allclose(by_loop(*given, *stacks), wanted(*given, *stacks), rtol=1e-5, atol=1e-4)


def test_large_experts_come_in_tiles(copies):
    given, stacks = routed(3, hidden=8, count=6, chosen=2), experts(inner=384, hidden=8, count=6)
    hit = sorted(set(np.asarray(given[1]).ravel().tolist()))
    got = by_kernel(*given, *stacks, room=2 * 3 * 8 * 4 * 128)
    read = [(block[0], block[2]) for operand, block in copies if operand == "up"]
    assert read == [(expert, tile) for expert in hit for tile in range(3)]
    np.testing.assert_allclose(got, wanted(*given, *stacks), rtol=1e-5, atol=1e-3)


@pytest.mark.parametrize("mix", [by_kernel, by_loop])
def test_an_expert_that_is_not_hit_changes_nothing(mix):
    given, (up, down) = routed(5), experts()
    hit = np.isin(np.arange(COUNT), np.asarray(given[1]))
    poison = jnp.where(jnp.asarray(hit)[:, None, None], 0, jnp.nan)
    np.testing.assert_array_equal(mix(*given, up + poison, down + poison), mix(*given, up, down))


@pytest.mark.parametrize("mix", [by_kernel, by_loop])
@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_a_row_of_a_block_gets_what_it_gets_alone(mix, dtype):
    given, stacks = routed(16, dtype), experts(dtype)
    block = mix(*given, *stacks)
    for row in (0, 7, 15):
        alone = mix(*(part[row : row + 1] for part in given), *stacks)
        np.testing.assert_array_equal(alone, block[row : row + 1])
    other = mix(*(part[::-1] for part in given), *stacks)  # experts are added in their order, not a row's
    np.testing.assert_array_equal(other[::-1], block)
    turned = given[0], given[1][:, ::-1], given[2][:, ::-1]
    np.testing.assert_array_equal(mix(*turned, *stacks), block)


@pytest.mark.parametrize("mix", [by_kernel, by_loop])
def test_an_expert_that_overflows_on_a_row_it_does_not_serve_changes_nothing(mix):
    (rows, index, share), (up, down) = routed(5), experts()
    other = next(one for one in np.asarray(index[1]).tolist() if one not in np.asarray(index[0]))
    down = down.at[other].mul(1e30)
    rows = rows.at[0].mul(1e10)  # infinite with that expert, which the row is not routed to
    got, alone = mix(rows, index, share, up, down), mix(rows[:1], index[:1], share[:1], up, down)
    assert np.isfinite(alone).all()
    np.testing.assert_array_equal(got[:1], alone)


@pytest.mark.parametrize("mix", [by_kernel, by_loop])
def test_a_row_that_is_not_finite_stays_alone(mix):
    (rows, index, share), stacks = routed(4), experts()
    clean = mix(rows, index, share, *stacks)
    dirty = mix(rows.at[1].set(jnp.nan), index, share.at[1].set(jnp.nan), *stacks)
    assert np.isnan(dirty[1]).any()
    np.testing.assert_array_equal(np.delete(dirty, 1, 0), np.delete(clean, 1, 0))


def test_a_long_pass_is_cut(monkeypatch):
    assert (most_rows(2048), most_rows(4096), most_rows(7168)) == (512, 256, 128)
    given, stacks = routed(21), experts()
    mix = partial(hit_experts_jax, *given, *stacks, gate=gate, by_columns=True, apply=applying(*stacks))
    whole = mix()
    monkeypatch.setattr(hit_experts, "most_rows", lambda hidden: 8)
    np.testing.assert_array_equal(mix(), whole)


def test_expected_hits_are_those_of_a_uniform_router():
    rng = np.random.default_rng(0)
    drawn = [len(set(np.argsort(rng.random((16, COUNT)))[:, :CHOSEN].ravel())) for _ in range(300)]
    assert expected_hits(16, CHOSEN, COUNT) == pytest.approx(np.mean(drawn), rel=0.02)
    assert expected_hits(1, CHOSEN, COUNT) == pytest.approx(CHOSEN)
    assert hits_of(f"{NAME}_16x8of128by1.3") == (pytest.approx(expected_hits(16, CHOSEN, COUNT)), COUNT)
    assert hits_of("paged_attention.3") is None


def test_routes_name_each_hit_expert_once_and_repeat_the_last():
    index = jnp.array([[5, 2], [2, 9], [9, 5], [5, 2]], jnp.int32)
    share, order, count = routes_of(index, jnp.ones((4, 2)), 12)
    assert order.tolist() == [2, 5, 9, 9, 9, 9, 9, 9] and count == 3
    assert share.shape == (12, 4, 1) and share[:, :, 0].sum(1).tolist() == [
        0,
        0,
        3,
        0,
        0,
        3,
        0,
        0,
        0,
        2,
        0,
        0,
    ]


# --- in a model's program ----------------------------------------------------------------------------------


def compiled(module, given, prompts=False):
    weights = {name: jb.to_jax(leaf.detach()) for name, leaf in module.named_parameters()}

    def mix(weights, *given):
        return call_torch(lambda held, *given: functional_call(module, held, given), weights, *given)

    with tracing("highest"):
        if prompts:
            with reading_prompts():
                return jax.jit(mix).lower(weights, *given).compile(EXACT)(weights, *given)
        return jax.jit(mix).lower(weights, *given).compile(EXACT)(weights, *given)


@pytest.mark.parametrize("has_gate", [True, False])
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_the_program_of_experts_says_what_transformers_say(has_gate, rows, monkeypatch):
    torch.manual_seed(1)
    module, given = Experts(has_gate, False, False, False), routed_rows(rows)
    seen = []
    monkeypatch.setattr(
        ops, "hit_experts_jax", lambda *args, **how: seen.append(1) or hit_experts_jax(*args, **how)
    )
    with torch.no_grad():
        theirs = batched_mm_experts_forward(module, *given)
    ours = jb.to_torch(compiled(module, jb.to_jax((given[0], given[1].int(), given[2]))))
    torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-5)
    assert seen


@pytest.mark.parametrize("transposed", [True, False])
def test_a_loop_on_a_cpu_converts_no_whole_stack(transposed):
    torch.manual_seed(1)
    module, (rows, index, share) = Experts(True, transposed, transposed, False).bfloat16(), routed_rows(3)
    weights = {name: jb.to_jax(leaf.detach()) for name, leaf in module.named_parameters()}
    given = jb.to_jax((rows.bfloat16(), index.int(), share))

    def mix(weights, *given):
        return call_torch(lambda held, *given: functional_call(module, held, given), weights, *given)

    with tracing("highest"):
        program = jax.jit(mix).lower(weights, *given).compile(EXACT)
    wide = [shape for shape in re.findall(r"= f32\[([\d,]+)\]", program.as_text()) if shape.count(",") == 2]
    stacks = {",".join(map(str, leaf.shape)) for leaf in weights.values() if leaf.ndim == 3}
    entry = program.as_text().partition("ENTRY")[2]
    assert wide and not [shape for shape in stacks if f"= f32[{shape}]" in entry]


def test_prompts_and_odd_experts_keep_their_form(monkeypatch):
    torch.manual_seed(1)
    monkeypatch.setattr(ops, "hit_experts_jax", None)
    monkeypatch.setattr(ops, "MOST_OF_EXPERTS", 8)
    rows, index, share = routed_rows(9)
    given = jb.to_jax((rows, index.int(), share))
    compiled(Experts(True, False, False, False), given, prompts=True)
    compiled(Experts(True, True, True, False), given)
    with pytest.raises(TypeError):
        compiled(Experts(True, False, False, False), given)
