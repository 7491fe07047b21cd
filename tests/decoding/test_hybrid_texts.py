"""Targets with recurrent layers keep their text in chunks, ragged rows, trees, turns, files, runtimes."""

from dataclasses import replace
from functools import cache, partial
from typing import Any

import pytest
import torch
from support.hybrids import KINDS, make_hybrid, own_greedy
from support.refusals import refuses
from support.scripted import Scripted, pad, run
from support.tabled import Tabled, with_path
from support.tiny import correlate, make_drafter

import torch_dflash as td
from torch_dflash.cache.recurrent import RecurrentLayer
from torch_dflash.decode import Pair
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.plain import PlainProposer
from torch_dflash.targets import tested
from torch_dflash.targets.adapter import Target
from torch_dflash.train.features.extract import FeatureExtractor
from torch_dflash.verify.check import collect_tensors

NEW = 14
PROMPTS = [[(7 * i + 3) % 89 for i in range(37)], [3, 1, 4], [9, 2, 6, 40, 41, 42, 9, 2, 6]]
SIZES: Any = {"max_length": 64, "batch_size": 3, "prefill_chunk_size": 16, "page_size": 16}


@cache
def pair(kind):
    target = make_hybrid(kind)
    drafter = make_drafter(target, num_hidden_layers=1, target_layer_ids=[0, 1])
    correlate(target, drafter, 8.0)
    return target, drafter


@cache
def own(kind, row):
    return own_greedy(pair(kind)[0], PROMPTS[row], NEW)


@pytest.mark.parametrize("kind", KINDS)
def test_greedy_text_is_that_of_uncached_forwards(kind):
    target, drafter = pair(kind)
    for given, cache_kind in ((drafter, "static"), (None, "static"), (drafter, "paged")):
        if kind == "kimi_linear" and cache_kind == "paged":
            continue
        engine = td.compile(target, given, runtime="eager", cache=cache_kind, **SIZES)
        for rows in ((0, 1, 2), (2, 0, 1)):  # the same rows of the batch hold other texts before
            texts, stats = run(engine, [PROMPTS[row] for row in rows], max_new_tokens=NEW, do_sample=False)
            assert texts == [own(kind, row) for row in rows]
        assert given is None or stats.mean_acceptance_length > 1.2


@pytest.mark.parametrize("kind", ["qwen3_5", "falcon_h1", "lfm2", "kimi_linear"])
@pytest.mark.parametrize("cache_kind", ["static", "paged"])
def test_the_accepted_branch_of_a_tree_is_taken_in(kind, cache_kind):
    proposer = Tabled(3, 128, 8, 4)
    engine = td.compile(pair(kind)[0], proposer, runtime="eager", cache=cache_kind, **SIZES)
    proposer.fill([p + own(kind, row) for row, p in enumerate(PROMPTS)], with_path(7, 4))
    texts, stats = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert texts == [own(kind, row) for row in range(3)] and stats.mean_acceptance_length > 2.5


def test_sampled_text_is_that_of_plain_decoding():
    target, options = pair("qwen3_5")[0], {"do_sample": True, "temperature": [0.0, 1.0, 4.0], "seed": 3}
    plain = td.compile(target, None, runtime="eager", **SIZES)
    wanted = run(plain, PROMPTS, max_new_tokens=NEW, **options)[0]
    proposer = Scripted(3, 64, 5)
    proposer.say([p + text for p, text in zip(PROMPTS, wanted, strict=True)])
    drafted = td.compile(target, proposer, runtime="eager", **SIZES)
    said, stats = run(drafted, PROMPTS, max_new_tokens=NEW, **options)
    assert said == wanted and stats.mean_acceptance_length > 4


def ask(session, text, settled=0, **options):
    asked = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6} | options
    return [token for gain in session.gains(text, settled, **asked) for token in gain.tokens]


def turns(engine, kind):
    """A chat: turns that continue, a turn with a rewritten answer, a turn that edits an early part."""
    target, session, text, read = pair(kind)[0], engine.session(), PROMPTS[2], []
    for question in ([7, 8, 9], [10, 11]):
        got = ask(session, text, len(text) - 1)
        assert got == own_greedy(target, text, 6)
        read.append(session.stats.prefilled)
        text = text + got + question
    text = text[: len(PROMPTS[2])] + [5, 5, 5]  # the answer is not the decoded text: back to the prompt
    assert ask(session, text) == own_greedy(target, text, 6)
    read.append(session.stats.prefilled)
    text = [1, *text]
    assert ask(session, text) == own_greedy(target, text, 6)
    return [*read, session.stats.prefilled]


READ = [9, 4, 4, 13]
"""Tokens that each of the turns reads: a recurrent layer goes back to the end of an earlier prompt."""


@pytest.mark.parametrize("kind", KINDS)
def test_turns_say_what_a_fresh_text_does_and_go_back_to_a_snapshot(kind):
    target, drafter = pair(kind)
    engine = td.compile(target, drafter, runtime="eager", max_length=64)
    assert turns(engine, kind) == READ


@pytest.fixture(scope="module")
def compiled():
    target, drafter = pair("qwen3_5")
    return td.compile(target, drafter, runtime="xla", rounds_per_chunk=2, **SIZES | {"cache": "paged"})


def test_one_program_says_the_same(compiled):
    texts, stats = run(compiled, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert texts == [own("qwen3_5", row) for row in range(3)] and stats.mean_acceptance_length > 1.2
    assert turns(compiled, "qwen3_5") == READ


def test_a_state_crosses_the_border_and_a_file_in_mid_generation(compiled, tmp_path):
    target, drafter = pair("qwen3_5")
    eager = td.compile(target, drafter, runtime="eager", rounds_per_chunk=2, **SIZES | {"cache": "paged"})
    options = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": None}
    for first, second in ((compiled, eager), (eager, compiled)):
        state = first.advance(first.start(*pad(PROMPTS), **options))
        td.save_state(state, tmp_path / "state", first)
        state = td.load_state(tmp_path / "state", second)
        for _ in range(NEW):
            state = second.advance(state)
        found = second.runtime.fetch({"tokens": state.tokens, "cache": state.cache})
        for row, prompt in enumerate(PROMPTS):
            text = found["tokens"][row, len(prompt) : len(prompt) + NEW].tolist()
            assert text == own("qwen3_5", row)
        recurrent = [layer for layer in found["cache"] if isinstance(layer, RecurrentLayer)]
        assert recurrent and all(layer.state.dtype == torch.float32 for layer in recurrent)


def test_states_stay_in_float32_in_a_half_precision_model():
    target = make_hybrid("qwen3_5").bfloat16()
    engine = td.compile(target, td.NGramProposer(4), runtime="eager", **SIZES)
    state = engine.start(*pad(PROMPTS), max_new_tokens=NEW, do_sample=False)
    layer: Any = engine.advance(state).cache[0]
    assert layer.state.dtype == torch.float32 and layer.tail.dtype == torch.bfloat16


def test_a_class_that_is_known_for_attention_alone_is_tried_by_a_twin(monkeypatch):
    target = make_hybrid("qwen3_5")
    name = type(target).__name__
    assert tested.is_tested(target, recurrent=True) and name in tested.TESTED
    monkeypatch.setattr(tested, "TESTED_RECURRENT", tested.TESTED_RECURRENT - {name})
    assert not tested.is_tested(target, recurrent=True) and tested.is_tested(target)
    td.compile(target, None, runtime="eager", **SIZES)  # and the twin decodes rightly


def test_a_twin_sees_states_that_are_taken_in_wrongly(monkeypatch):
    target = make_hybrid("qwen3_5", linear_num_key_heads=4)  # of another structure, which was not yet tried
    monkeypatch.setattr(tested, "TESTED_RECURRENT", frozenset())
    monkeypatch.setattr(
        "torch_dflash.cache.recurrent.state_after", lambda state, kept, count, path=None: state
    )
    with refuses(ValueError, "a tiny random twin of it is decoded otherwise"):
        td.compile(target, None, runtime="eager", **SIZES)


def test_a_layer_that_keeps_another_state_is_refused():
    import transformers as hf
    from support.tiny import BASE

    given: Any = BASE | {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8}
    with refuses(ValueError, "JambaForCausalLM", "neither a short convolution's nor one of"):
        td.compile(hf.JambaForCausalLM(hf.JambaConfig(**given)).eval(), None, runtime="eager", **SIZES)


def test_a_mixer_with_another_forward_is_refused_by_that_cause():
    target: Any = make_hybrid("qwen3_5")
    mixer = target.model.layers[0].linear_attn
    mixer.forward = partial(type(mixer).forward, mixer)
    with refuses(ValueError, "layer model.layers.0.linear_attn was replaced", "Qwen3_5GatedDeltaNet"):
        td.compile(target, None, runtime="eager", **SIZES)


def test_widths_and_penalties_are_those_of_plain_decoding():
    target, drafter = pair("qwen3_5")
    options = {"repetition_penalty": 9.0, "do_sample": False}
    said = []
    for given, width in ((None, None), (drafter, "auto"), (drafter, 3)):
        rules = ("repetition_penalty",)
        engine = td.compile(target, given, runtime="eager", verify_width=width, processors=rules, **SIZES)
        said.append(run(engine, PROMPTS, max_new_tokens=NEW, **options)[0])
    assert said[0] == said[1] == said[2] != [own("qwen3_5", row) for row in range(3)]


def test_features_for_training_are_the_targets_own():
    target = pair("qwen3_5")[0]
    extract = FeatureExtractor(target, (0, 1), torch.float32, "eager")
    found = extract(PROMPTS)
    with torch.no_grad():
        for row, prompt in enumerate(PROMPTS):
            states = target(torch.tensor([prompt]), output_hidden_states=True, use_cache=False).hidden_states
            torch.testing.assert_close(found[row, : len(prompt), :32], states[1][0])


def test_a_tap_before_the_residual_is_seen():
    """Features of a round are the output of a block, not of a mixer."""
    target = pair("qwen3_5")[0]
    skeleton = Target(target)
    assert skeleton.blocks.paths == ("model.layers.0", "model.layers.1")
    own = functional_features(skeleton, target)
    with torch.no_grad():
        wanted = target(torch.tensor([PROMPTS[1]]), output_hidden_states=True).hidden_states[1]
    torch.testing.assert_close(own, wanted)
    paths = tuple(f"{path}.linear_attn" for path in skeleton.blocks.paths[:1])
    skeleton.blocks = replace(skeleton.blocks, paths=paths)
    assert (functional_features(skeleton, target) - wanted).abs().max() > 0.1


def functional_features(skeleton, target):
    """The first layer's tapped output, of a pass over the second prompt."""
    plan = DecodePlan(1, 64, 4, 4)
    pair = Pair(skeleton, PlainProposer(), plan)
    params = collect_tensors(skeleton.model, target, "target.model.")
    ids = torch.tensor([PROMPTS[1]], dtype=torch.int32)
    start, count = torch.zeros(1, dtype=torch.int32), torch.tensor([3], dtype=torch.int32)

    def step(pair):
        return pair.target(ids, start, pair.target.start(plan), (0,), count=count).features

    return pair.run(step, params)
