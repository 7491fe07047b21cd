"""The pure-JAX target and loop equal the lowered ones: taps, logits, drafts, tokens, acceptance."""

import dataclasses
import json
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support import authors
from support.reference import EXACT, LLAMA3, PROMPTS, Pair, soften
from support.scripted import run as run_engine
from support.tiny import make_target, randomise

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.programs.lower import lower, tracing
from jax_bridge.reference import load_target, loop
from jax_bridge.reference import static as static_drafter
from jax_bridge.reference.config import LayerMask, read_target_config
from jax_bridge.reference.target import empty_cache, forward_target
from torch_dflash.cache.dense import StaticLayer
from torch_dflash.cache.ring import RingLayer
from torch_dflash.proposers.dflash.proposer import DFlashState
from torch_dflash.state import DecodeState, Sampling


@pytest.fixture(scope="module")
def found(pair) -> list[authors.Run]:
    """The reference's rounds on every prompt, recorded as `authors.engine_runs` does."""
    look = jax.jit(lambda weights, state: loop.draft_block(pair.models, weights, state)[:2])
    state = loop.start(pair.models, pair.weights, PROMPTS, authors.NEW)
    runs = [authors.Run() for _ in PROMPTS]
    while not state.done.all():
        hidden, drafts = look(pair.weights, state)
        after = pair.step(pair.weights, state)
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


@pytest.fixture(scope="module", params=["llama", "qwen3", "dflash2"])
def pair(request, tmp_path_factory):
    # The drafter of the tied pair has a sliding causal layer and a full one.
    family, overrides = {
        "llama": ("llama", {}),
        "qwen3": ("qwen3", authors.MIXED),
        "dflash2": ("llama", authors.SECOND | {"conv_group_size": 16}),
    }[request.param]
    return Pair(tmp_path_factory.mktemp(request.param), family, overrides)


@pytest.fixture(scope="module")
def lowered(pair):
    return authors.engine_runs(pair, "xla")


def test_every_draft_token_and_acceptance_length(found, lowered):
    for ours, theirs in zip(lowered, found, strict=True):
        assert ours.hidden.keys() == theirs.hidden.keys() and len(ours.hidden) > 2
        assert authors.gap(theirs.hidden, ours.hidden) < authors.LOOP
        assert theirs.drafts == ours.drafts
        assert theirs.text == ours.text and len(ours.text) == authors.NEW
        assert theirs.accepted == ours.accepted
    lengths = {length for run in found for length in run.accepted}
    assert {1, 2, 4} < lengths  # a drafter that is never or always right would test little


def test_the_comparison_sees_each_wrong_convention(pair, lowered, monkeypatch):
    target, drafter = pair.models
    width, tables = drafter.block_size, static_drafter.rotary_tables
    later = tuple(tap + 1 for tap in drafter.target_layer_ids)
    wrong = {
        "next layer tapped": dataclasses.replace(drafter, target_layer_ids=later),
        "causal blocks": dataclasses.replace(drafter, masks=(LayerMask(causal=True),) * 2),
    }

    def gap(drafter):
        models = loop.Models(target, drafter)
        state = loop.start(models, pair.weights, PROMPTS, 4)
        # A new function for this call: a rule changed below must not use an earlier trace.
        hidden = jax.jit(lambda weights, state: loop.draft_block(models, weights, state).hidden)
        rows = zip(hidden(pair.weights, state), lowered, PROMPTS, strict=True)
        return max(
            float(np.abs(row[1:] - run.hidden[len(prompt)].numpy()).max()) for row, run, prompt in rows
        )

    assert gap(drafter) < EXACT
    for name, config in wrong.items():
        assert gap(config) > 1e-3, name

    def shifted(rope, at, dtype):
        block = jnp.arange(at.shape[1]) >= width if at.shape[1] == 2 * width else 0
        return tables(rope, at + block, dtype)

    monkeypatch.setattr(static_drafter, "rotary_tables", shifted)
    assert gap(drafter) > 1e-3, "block one position late"


def decode_state(state: loop.State, slots: int) -> DecodeState:
    """Our state from a reference state: the same arrays, with slots added at the end."""

    def more(array, axis):
        widths = [(0, 0)] * array.ndim
        widths[axis] = (0, slots - array.shape[axis])
        return jnp.pad(array, widths)

    def cache(layers):
        return tuple(StaticLayer(more(layer.key, 2), more(layer.value, 2)) for layer in layers)

    zeros = jnp.zeros_like(state.length)
    return DecodeState(
        tokens=more(state.tokens, 1),
        length=state.length,
        limit=state.limit,
        stop_ids=jnp.full((len(PROMPTS), 8), -1),
        done=state.done,
        sampling=Sampling(zeros * 0.0, zeros, zeros + 1.0, zeros * 0.0, zeros),
        cache=cache(state.target),
        page_table=None,
        proposer=DFlashState(
            cache(state.drafter), state.length - state.buffered, state.context, state.buffered
        ),
        rules=(),
        accepted=more(state.accepted, 1),
        rounds=state.rounds,
    )


def in_rings(state: DecodeState, engine) -> DecodeState:
    """The draft layers with a window as rings, which the reference keeps dense."""
    proposer = state.proposer
    empty, zeros = engine.pair.proposer.start(engine.plan, "cpu").layers, torch.zeros_like(proposer.length)
    layers = tuple(
        own.write(dense.key, dense.value, zeros, proposer.length) if isinstance(own, RingLayer) else dense
        for own, dense in zip(empty, proposer.layers, strict=True)
    )
    return dataclasses.replace(state, proposer=dataclasses.replace(proposer, layers=layers))


def test_a_reference_generation_goes_on_in_ours(pair, lowered):
    state = loop.start(pair.models, pair.weights, PROMPTS, authors.NEW)
    for _ in range(2):
        state = pair.step(pair.weights, state)
    engine = authors.make_engine(pair, "eager")
    state = in_rings(jb.state_to_torch(decode_state(state, engine.plan.slots)), engine)
    while not state.done.all():
        state = engine.advance(state)
    for row, expected in enumerate(lowered):
        text = state.tokens[row, len(PROMPTS[row]) : int(state.length[row]) + 1]
        assert text.tolist() == expected.text


def test_decode_stops_where_ours_does(pair, lowered):
    stops = (lowered[0].text[5], lowered[1].text[9])
    engine = authors.make_engine(pair, "eager")
    expected, stats = run_engine(
        engine, PROMPTS, max_new_tokens=20, do_sample=False, eos_token_id=list(stops), pad_token_id=0
    )
    texts, accepted = loop.decode(pair.models, pair.weights, PROMPTS, 20, stops)
    assert min(map(len, texts)) < 20
    for row, text in enumerate(texts):
        assert text == expected[row][: len(text)] and not any(expected[row][len(text) :])
    assert accepted == [list(lengths) for lengths in stats.acceptance_lengths]


TARGETS = {
    "qwen3": ("qwen3", {}),
    "llama, no grouping, bf16": ("llama", {"num_key_value_heads": 4}),
    "tied llama, llama3 rope": ("llama", {"tie_word_embeddings": True, "rope_parameters": LLAMA3}),
    "untied qwen3, bias, one kv head": (
        "qwen3",
        {"tie_word_embeddings": False, "num_key_value_heads": 1, "attention_bias": True},
    ),
}


@pytest.mark.parametrize("name", TARGETS)
def test_taps_logits_and_cache_of_the_target(tmp_path, name):
    family, overrides = TARGETS[name]
    model = soften(randomise(make_target(family, **overrides), seed=0, gain=0.7))
    bound = EXACT
    if "bf16" in name:
        model, bound = model.to(torch.bfloat16), 0.1  # the dtype must come from the file
    model.save_pretrained(tmp_path)
    params, config = load_target(tmp_path)
    engine = td.compile(model, None, runtime="xla", batch_size=3, max_length=48)
    weights, taps = engine.runtime.refresh(engine.tensors()), (0, 1, 2, 3)

    def lowered(pair, ids, start, cache):
        out = pair.target(ids, start, cache, taps)
        return out.logits, out.features, out.cache

    ours = jax.jit(lower(partial(engine.pair.run, lowered)))
    theirs = jax.jit(forward_target, static_argnums=(1, 5))
    dtype = params["model.norm.weight"].dtype
    cache = empty_cache(config, 3, engine.plan.slots, dtype)
    our_cache = tuple(StaticLayer(*layer) for layer in cache)
    generator = np.random.default_rng(0)
    for rows, start in ((9, [0, 0, 0]), (6, [9, 4, 7])):  # a prompt, then a block over stale rows
        ids = jnp.asarray(generator.integers(0, 96, (3, rows)), jnp.int32)
        start = jnp.array(start, jnp.int32)
        with tracing("highest"):
            logits, features, our_cache = ours(weights, ids, start, our_cache)
        found = theirs(params, config, ids, start, cache, taps)
        cache = found.cache
        assert found.logits.dtype == dtype and float(jnp.abs(features).max()) > 1
        pairs = [(found.logits, logits), (found.features, features)]
        pairs += [
            (a, b)
            for x, y in zip(cache, our_cache, strict=True)
            for a, b in ((x.key, y.key), (x.value, y.value))
        ]
        for a, b in pairs:
            assert a.shape == b.shape
            np.testing.assert_allclose(a.astype(jnp.float32), b.astype(jnp.float32), atol=bound, rtol=0)


def test_a_tied_head_is_used_once(pair, tmp_path):
    pair.target.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    embedding = tensors["model.embed_tokens.weight"]
    save_file(tensors | {"lm_head.weight": embedding.clone()}, file)
    assert ("lm_head.weight" in load_target(tmp_path)[0]) is not pair.models.target.tie_word_embeddings
    raw = json.loads((tmp_path / "config.json").read_text())
    assert read_target_config(raw) == pair.models.target
    for changes in ({"model_type": "gpt_oss"}, {"layer_types": ["sliding_attention"] * 4}):
        with pytest.raises(ValueError):
            read_target_config(raw | changes)
