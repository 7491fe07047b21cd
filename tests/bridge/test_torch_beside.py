"""torch's own compiler and optimizers run in a process that has imported torchax."""

from __future__ import annotations

import torch

import jax_bridge  # noqa: F401  imports torchax


def test_torch_finds_no_accelerator():
    assert not torch.accelerator.is_available()  # torchax says that its jax device is one
    layer = torch.nn.Linear(2, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    torch.compile(layer, backend="eager")(torch.ones(1, 2)).sum().backward()
    before = layer.bias.detach().clone()
    optimizer.step()
    assert not layer.bias.equal(before)
