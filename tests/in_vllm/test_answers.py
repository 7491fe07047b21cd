"""Requests of every kind in one batch keep the texts, laws and log-probabilities of plain decoding."""

from collections import defaultdict
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pair
import pytest
import torch
import torchax
from replay import law
from support import replay_of, run
from torchax.interop import jax_view, torch_view
from tpu_inference.layers.jax.sample import rejection_sampler
from tpu_inference.layers.jax.sample.sampling_metadata import TPUSupportedSamplingMetadata
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


GRAMMAR = {"structured_outputs": StructuredOutputsParams(regex="(w1|w2|w3|w4)+")}
KINDS = {}, {"logprobs": 2}, GRAMMAR, GRAMMAR | {"logprobs": 2}
SAMPLED = (
    {"temperature": 0.6, "top_k": 20, "top_p": 0.95},
    {"temperature": 0.7, "top_k": 20, "top_p": 0.8},
    {"temperature": 1.5, "top_p": 0.9} | GRAMMAR | {"logprobs": 2},
)


def mixed():
    """Greedy requests of each kind, of 24 tokens, with 45 sampled ones of four tokens behind each."""
    prompt, found = pair.prompts(1, 3)[0], []
    for at, bare in enumerate(batch()):
        found.append((bare[0], bare[1] | KINDS[at % 4]))
        found += [(prompt, {"max_tokens": 4} | SAMPLED[k % 3]) for k in range(45)]
    return found


@BOTH
def test_greedy_requests_are_exact_beside_sampled_ones_which_keep_their_law(async_scheduling, recwarn):
    """With and without log-probabilities and grammars, in one batch, against the target's float32 logits.

    The files hold bfloat16, and vLLM computes in float32: the test does not cover features that are cast.
    """
    options = IN_WORDS | {"max_num_seqs": 8, "max_num_batched_tokens": 64}
    drafted = run("flat", [mixed()], async_scheduling=async_scheduling, **options)
    assert not [one for one in recwarn if "features are cast" in str(one.message)]
    replay, steps = replay_of("flat"), defaultdict(list)
    for (prompt, params), (text,), told in zip(mixed(), drafted.texts[0], drafted.logprobs[0], strict=True):
        logits = replay.read([*prompt, *text])[1][len(prompt) - 1 : -1].clone()
        if "structured_outputs" in params:
            logits[:, [0, *range(5, pair.VOCAB)]] = -torch.inf
        said = torch.tensor(text)[:, None]
        own = params.get("temperature", 0), params.get("top_k", 0), params.get("top_p", 1)
        assert (law(logits, *own, slack=1e-3).gather(-1, said) > 0).all(), (params, text)
        values = [step[token] for step, token in zip(told, text, strict=True)] if "logprobs" in params else []
        expected = logits.log_softmax(-1).gather(-1, said)[: len(values), 0]
        assert values == pytest.approx(expected.tolist(), abs=1e-3)
        share, best = law(logits, *own).max(-1)
        verified = slice(1, None)  # the first token of a text was no draft
        steps[own] += zip(share[verified].tolist(), (best == said[:, 0])[verified].tolist(), strict=True)
    for own, found in steps.items():
        excess = sum(hit - share for share, hit in found)
        spread = sum(share * (1 - share) for share, _ in found) ** 0.5
        assert abs(excess) <= 4 * spread, (own, excess, spread)
    assert len(steps) == 4


def test_a_draft_that_cannot_be_is_rejected_where_the_number_drawn_is_0(monkeypatch):
    """Upstream's own functions reject such a draft; a uniform number of [0, 1) is 0 once in eight million."""
    monkeypatch.setattr(jax.random, "uniform", lambda key, shape: jnp.zeros(shape))
    logits, drafts = jnp.array([[5.0, 4.0, 0.0]] * 2), jnp.array([1, 1])
    params = {"temperature": [-1.0, 0.6], "top_k": [0, 1], "top_p": [1.0, 1.0]}
    params = TPUSupportedSamplingMetadata(**{name: jnp.array(value) for name, value in params.items()})
    probs = rejection_sampler._compute_probs(logits, drafts, params)
    ids, bonus, key = jnp.array([1, 1]), jnp.array([2, 2]), jax.random.key(0)
    said = rejection_sampler.rejection_sample(ids, drafts, None, probs, bonus, True, key)
    assert said.tolist() == [0, 0, -1, -1]


def test_columns_that_pad_a_vocabulary_lose():
    """This release cuts the columns off by itself; another may not."""
    runner = SimpleNamespace(
        compute_logits_fn=lambda target, rows, lora: jnp.full((len(rows), 256), 1e4).at[:, :250].set(0),
        model_config=SimpleNamespace(get_vocab_size=lambda: 250),
    )
    with torchax.default_env():
        logits = Proposer._logits(SimpleNamespace(runner=runner), {}, torch_view(jnp.ones((2, 3, 4))))
    assert jax_view(logits).argmax(-1).max() < 250
