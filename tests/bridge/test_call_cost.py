"""Counts the host work of a call outside compiled programs."""

import jax
import pytest
import torch
from support.tiny import make_pair
from torch import nn

import torch_dflash as td
from jax_bridge.devices import weights
from torch_dflash.engine.engine import Engine
from torch_dflash.targets import guard

IDS = torch.tensor([[3, 1, 4, 1, 5]])
OPTIONS = {"do_sample": False, "eos_token_id": None}


@pytest.fixture
def counts(monkeypatch):
    """Counts the calls of each watched function since the fixture was made, by name."""
    found: dict[str, int] = {}

    def counted(owner, name, label):
        whole = getattr(owner, name)

        def count(*args, **named):
            found[label] = found.get(label, 0) + 1
            return whole(*args, **named)

        monkeypatch.setattr(owner, name, count)

    counted(nn.Module, "named_modules", "walks")
    counted(Engine, "follow", "asked")
    counted(jax, "device_put", "transfers")
    counted(weights, "samples", "weights looked at")
    counted(guard, "inner_values", "functions looked into")
    return found


@pytest.fixture(scope="module")
def engine():
    target, drafter = make_pair("llama")
    engine = td.compile(target, drafter, max_length=32, rounds_per_chunk=1)
    engine.generate(IDS, max_new_tokens=4, **OPTIONS)
    engine.advance(engine.advance(engine.start(IDS, max_new_tokens=12, **OPTIONS)))
    return engine


def test_a_call_walks_over_no_module_and_sends_what_it_asks_for_at_once(engine, counts):
    engine.generate(IDS, max_new_tokens=1, **OPTIONS)
    assert counts.pop("asked") == 1
    assert counts.pop("transfers") <= 6  # the request's rows and a prompt's piece, twice each; a position
    assert not counts.get("walks") and not counts.get("weights looked at")
    assert counts.pop("functions looked into") < 9  # this fixture's class; the classes of drafters name none


def test_a_chunk_asks_nothing_and_walks_over_nothing(engine, counts):
    state = engine.start(IDS, max_new_tokens=12, **OPTIONS)
    counts.clear()
    engine.advance(engine.advance(state))
    assert not counts
