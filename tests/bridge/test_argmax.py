"""The largest entry by blocks is where torch's is: of equal ones the first, NaN above all."""

from __future__ import annotations

import re
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest
import torch
from support.lowered import lowered
from support.tiny import make_drafter, make_target

import jax_bridge as jb
import torch_dflash as td
from jax_bridge import ops
from jax_bridge.kernels import row_reductions as argmax
from jax_bridge.programs import lower

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
