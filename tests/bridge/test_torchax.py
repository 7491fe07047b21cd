"""Steps are traced once, garbage waits for a program, and torch works in a process with torchax."""

import gc
from contextlib import suppress

import jax
import jax.numpy as jnp
import pytest
import torch
from support.tiny import make_target
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

import torch_dflash as td
from jax_bridge._torchax import call_torch, environment, once, sharing
from jax_bridge.programs import lower
from torch_dflash.rows import RowRequests

traced = []


def step(x, y, *, factor):
    traced.append((x.shape, factor))
    return x * factor if y is None else x * factor + y


def test_calls_that_are_alike_share_a_trace():
    row, square = jnp.ones(3), jnp.ones((2, 2))

    def whole(row, square):
        rows = (
            once(step, row, None, factor=2) + once(step, row, None, factor=2) + once(step, row, row, factor=2)
        )
        return rows, once(step, square, None, factor=2), once(step, row, None, factor=3)

    plain = whole(row, square)
    traced.clear()
    for _ in range(2):  # as another program, or after a change of the code, which must be seen
        with sharing():
            out = jax.jit(lambda *args: whole(*args))(row, square)
        assert jax.tree.all(jax.tree.map(jnp.array_equal, plain, out))
    assert traced == 2 * [((3,), 2), ((3,), 2), ((2, 2), 2), ((3,), 3)]


def test_more_layers_are_no_more_writes_to_trace():
    writes = []
    for layers in (2, 4):
        engine = td.compile(make_target("llama", num_hidden_layers=layers), None, max_length=48)
        params = engine.runtime.refresh(engine.tensors())
        state = engine.runtime.begin(params, RowRequests.idle(engine.plan))
        with lower.tracing("highest"):
            text = jax.jit(engine.runtime._rounds[1]).lower(params, state).as_text()
        writes.append(text.count("stablehlo.dynamic_update_slice"))
    assert writes[0] == writes[1] > 0


@pytest.mark.parametrize("was_on", [True, False])
def test_no_garbage_is_looked_for_while_a_program_is_traced(was_on):
    """Each collection would walk all objects of torch and JAX; the user's setting comes back afterwards."""
    seen, before = [], gc.isenabled()

    def step(row):
        seen.append(gc.isenabled())
        if len(row) == 3:
            raise MemoryError
        return row

    (gc.enable if was_on else gc.disable)()
    try:
        for length in (2, 3):
            with suppress(MemoryError):
                lower.Programs("highest").get("step", step, (jnp.zeros(length),))
            seen.append(gc.isenabled())
    finally:
        (gc.enable if before else gc.disable)()
    assert seen == [False, was_on] * 2


def test_torch_finds_no_accelerator():
    assert not torch.accelerator.is_available()  # torchax reports its jax device as one
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.compile(layer, backend="eager")(torch.ones(1, 2)).sum().backward()
    before = layer.bias.detach().clone()
    optimizer.step()
    assert not layer.bias.equal(before)


@pytest.mark.parametrize("entered", ["_function_mode", "_dispatch_mode", ""])
def test_an_interrupt_while_a_step_is_traced_leaves_torch_as_it_was(entered):
    def step(rows):
        # As around each operation; the interrupt comes before the exit, or before the entry is complete.
        (getattr(environment(), entered) if entered else environment()).__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_torch(step, jnp.zeros(2))
    left = _get_current_function_mode_stack() + _get_current_dispatch_mode_stack()
    while _get_current_function_mode_stack():
        torch.overrides._pop_mode()
    while _get_current_dispatch_mode_stack():  # no other test may fail by this change
        _pop_mode()
    assert left == []
