"""torch's own compiler and optimizers run in a process that has imported torchax."""

import jax.numpy as jnp
import pytest
import torch
from torch.overrides import _get_current_function_mode_stack
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from jax_bridge._torchax import call_torch, environment


def test_torch_finds_no_accelerator():
    assert not torch.accelerator.is_available()  # torchax says that its jax device is one
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.compile(layer, backend="eager")(torch.ones(1, 2)).sum().backward()
    before = layer.bias.detach().clone()
    optimizer.step()
    assert not layer.bias.equal(before)


@pytest.mark.parametrize("entered", ["_function_mode", "_dispatch_mode", ""])
def test_an_interrupt_while_a_step_is_traced_leaves_torch_as_it_was(entered):
    def step(rows):
        # As for each operation; the interrupt comes before it is left, or before all of it is entered.
        (getattr(environment(), entered) if entered else environment()).__enter__()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        call_torch(step, jnp.zeros(2))
    left = _get_current_function_mode_stack() + _get_current_dispatch_mode_stack()
    while _get_current_function_mode_stack():
        torch.overrides._pop_mode()
    while _get_current_dispatch_mode_stack():  # no other test is to fail by it
        _pop_mode()
    assert left == []
