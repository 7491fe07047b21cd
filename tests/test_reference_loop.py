"""The pure-JAX target and loop against the lowered ones: taps, logits, drafts, tokens, acceptance."""

from __future__ import annotations

import dataclasses
from functools import partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import parity
import pytest
import torch
from models import make_pair, randomise
from transformers import LlamaForCausalLM

import jax_bridge as jb
from jax_bridge._torchax import call_torch
from jax_bridge.lower import tracing
from jax_bridge.reference import load, load_target, loop, static_drafter
from jax_bridge.reference.target import empty_cache, forward_target
from jax_bridge.reference.target_config import read_target_config

EXACT = 1e-5
PROMPTS = parity.prompts()
LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}


class Pair:
    """A pair of models, and what the reference read from the files they were saved to."""

    def __init__(self, folder, family, overrides):
        self.target, self.drafter = make_pair(family, agree=8.0, **overrides)
        randomise(self.drafter, seed=1, gain=1.2)
        self.target.save_pretrained(folder / "target")
        self.drafter.save_pretrained(folder / "drafter")
        target, drafter = load_target(folder / "target"), load(folder / "drafter")
        self.weights = loop.Weights(target[0], drafter[0])
        self.models = loop.Models(target[1], drafter[1])


def reference_runs(pair: Pair, models=None, new=parity.NEW) -> list[parity.Run]:
    """The reference's rounds on every prompt, recorded as `parity.engine_runs` does."""
    models = models or pair.models
    # Lambdas of this call: a test that changes a rule must not meet what was traced before.
    look = jax.jit(lambda weights, state: loop.draft(models, weights, state)[:2])
    step = jax.jit(lambda weights, state: loop.decode_round(models, weights, state))
    state = loop.start(models, pair.weights, PROMPTS, new)
    runs = [parity.Run() for _ in PROMPTS]
    while not state.done.all():
        hidden, drafts = look(pair.weights, state)
        after = step(pair.weights, state)
        for row, run in enumerate(runs):
            if not state.done[row]:
                at = int(state.length[row])
                run.hidden[at] = torch.from_numpy(np.array(hidden[row, 1:]))
                run.drafts[at] = drafts[row].tolist()
                run.accepted.append(int(after.length[row]) - at)
        state = after
    for row, run in enumerate(runs):
        run.text = state.tokens[row, len(PROMPTS[row]) : int(state.length[row]) + 1].tolist()
    return runs


@pytest.fixture(scope="module", params=["llama", "qwen3"])
def pair(request, tmp_path_factory):
    overrides = {"llama": {}, "qwen3": parity.MIXED}[request.param]
    return Pair(tmp_path_factory.mktemp(request.param), request.param, overrides)


@pytest.fixture(scope="module")
def lowered(pair):
    return parity.engine_runs(pair, "xla")


def test_report(pair, lowered):
    found = reference_runs(pair)
    for a, b in zip(found, lowered):
        print(parity.gap(a.hidden, b.hidden), a.text == b.text, a.accepted, b.accepted)
    assert 0
