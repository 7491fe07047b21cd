"""Shared parts of tests of refused input: a prompt, a ban on decoding steps, a check of messages."""

import re

import pytest
import torch

import torch_dflash.eager

IDS = torch.tensor([[3, 4, 5, 6]])


@pytest.fixture(autouse=True)
def no_step_runs(monkeypatch):
    """Fails a test that decodes a step before the error."""

    def ran(*args):
        pytest.fail("a step ran before the input was refused")

    for step in ("begin", "prefill", "decode_round"):
        monkeypatch.setattr(torch_dflash.eager, step, ran)


def refuses(error, *words):
    """``pytest.raises`` for a message that holds all ``words`` in this order."""
    return pytest.raises(error, match=".*".join(map(re.escape, words)))
