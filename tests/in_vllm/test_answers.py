"""Grammars and log-probabilities of requests that draft beside each other: those without drafting."""

from types import SimpleNamespace

import jax.numpy as jnp
import pair
import pytest
import torchax
from support import run
from torchax.interop import jax_view, torch_view
from vllm.sampling_params import StructuredOutputsParams

from jax_bridge.vllm import worker
from jax_bridge.vllm.proposer import Proposer

EXACT = {"dtype": "float32", "max_model_len": 128}
IN_WORDS = EXACT | {"skip_tokenizer_init": False}
BOTH = pytest.mark.parametrize("async_scheduling", [False, True])


def batch(**params):
    return [(prompt, {"max_tokens": 24} | params) for prompt in pair.prompts(8)]


def grammars():
    """Four requests with a grammar behind and between others."""
    free = batch()
    bound = batch(structured_outputs=StructuredOutputsParams(regex="(w1|w2|w3|w4)+"))
    return [[*free[:4], *bound[4:]], [(free, bound)[at % 2][at] for at in range(8)]]


def plainly(batches, **options):
    return run("tied", batches, drafted=False, async_scheduling=False, **options)


@BOTH
def test_grammars_beside_plain_requests(async_scheduling):
    drafted = run("tied", grammars(), async_scheduling=async_scheduling, **IN_WORDS)
    assert drafted.texts == plainly(grammars(), **IN_WORDS).texts
    assert {token for texts in drafted.texts[0][4:] for token in texts[0]} <= {1, 2, 3, 4}


def test_a_mask_in_the_rows_of_another_request_is_noticed(monkeypatch):
    right = worker.bits_of_rows
    monkeypatch.setattr(
        worker, "bits_of_rows", lambda one, two, three, drafts, rows: right(one, two, three, 0 * drafts, rows)
    )
    drafted = run("tied", grammars(), keep=False, **IN_WORDS)
    assert drafted.texts != plainly(grammars(), **IN_WORDS).texts


@BOTH
def test_log_probabilities(async_scheduling):
    """The first step of four requests at once has no drafts; later ones have."""
    plain = plainly([batch(logprobs=2)], **EXACT)
    drafted = run("tied", [batch(logprobs=2)], async_scheduling=async_scheduling, **EXACT)
    assert drafted.texts == plain.texts
    for one, other in zip(plain.logprobs[0], drafted.logprobs[0], strict=True):
        assert [list(step) for step in one] == [list(step) for step in other]
        values = [[value for step in steps for value in step.values()] for steps in (one, other)]
        assert values[0] == pytest.approx(values[1], abs=1e-3)


def test_columns_that_pad_a_vocabulary_lose():
    """This release cuts them off by itself; another may not."""
    runner = SimpleNamespace(
        compute_logits_fn=lambda target, rows, lora: jnp.full((len(rows), 256), 1e4).at[:, :250].set(0),
        model_config=SimpleNamespace(get_vocab_size=lambda: 250),
    )
    with torchax.default_env():
        logits = Proposer._logits(SimpleNamespace(runner=runner), {}, torch_view(jnp.ones((2, 3, 4))))
    assert jax_view(logits).argmax(-1).max() < 250
