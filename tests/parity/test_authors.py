"""Every round's hidden states equal the authors', transformers' loop's and the pure-JAX drafter's."""

from functools import cache

import dflash.model as authors
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.authors import (
    CASES,
    EXACT,
    LOOP,
    NEW,
    Case,
    authors_replay,
    authors_run,
    engine_runs,
    gap,
    native_run,
    prompts,
    replay,
    whole,
)
from support.scripted import own_text
from support.versions import needs_native

import jax_bridge.reference
import torch_dflash as td


@pytest.fixture(scope="module")
def case(tmp_path_factory):
    """``case(name)``: a case of `CASES`, built once."""
    return cache(lambda name: Case(tmp_path_factory.mktemp("drafter"), *CASES[name]))


def assert_same_rounds(case, runs) -> None:
    """Asserts same text, drafts, acceptance and hidden states in every round that the cap does not cut."""
    width = case.drafter.config.block_size
    for prompt, run, theirs in zip(prompts(), runs, case.runs, strict=True):
        assert run.text == theirs.text
        lengths = whole(theirs, len(prompt), NEW, width)
        assert run.accepted[: len(lengths)] == lengths
        assert sum(run.accepted) == sum(theirs.accepted) == NEW - 1
        assert theirs.hidden.keys() <= run.hidden.keys() and len(theirs.hidden) == len(lengths)
        assert gap(run.hidden, theirs.hidden) < LOOP
        assert all(run.drafts[start] == drafts for start, drafts in theirs.drafts.items())


@pytest.mark.parametrize("name", CASES)
def test_forward_equals_the_authors_network_in_every_round(case, name):
    for run in case(name).runs:
        assert gap(replay(case(name), run), run.hidden) < EXACT


@pytest.mark.parametrize("name", CASES)
def test_our_loop_equals_the_authors_in_every_round(case, name):
    runs = engine_runs(case(name))
    assert_same_rounds(case(name), runs)
    for run in runs:  # the authors' network and growing cache, on the features that our loop computed
        theirs = authors_replay(case(name), run)
        assert theirs.keys() == run.hidden.keys()
        assert gap(run.hidden, theirs) < EXACT


@pytest.mark.parametrize("name", ["sliding, symmetric", "everything", "dflash2", "dflash2, everything"])
def test_our_compiled_loop_equals_the_authors_in_every_round(case, name):
    assert_same_rounds(case(name), engine_runs(case(name), "xla"))


@pytest.mark.parametrize("name", CASES)
def test_generate_equals_the_authors_generate(case, name):
    built = case(name)
    for prompt, theirs in zip(prompts(), built.runs, strict=True):
        out = td.generate(
            built.target,
            built.drafter,
            torch.tensor([prompt]),
            torch.ones(1, len(prompt), dtype=torch.long),
            max_new_tokens=NEW,
            do_sample=False,
            runtime="eager",
            return_dict_in_generate=True,
        )
        assert out.sequences[0, len(prompt) :].tolist() == theirs.text
        lengths = whole(theirs, len(prompt), NEW, built.drafter.config.block_size)
        assert out.stats.acceptance_lengths[0][: len(lengths)] == lengths


def test_these_runs_tell_something(case):
    """Acceptance lengths vary within a run, whole blocks are accepted, and the text is no repetition."""
    runs = [run for name in CASES for run in case(name).runs]
    assert {length for run in runs for length in run.accepted} == set(range(1, 7))
    for name in CASES:
        assert len({length for run in case(name).runs for length in run.accepted}) >= 3, name
        assert all(len(run.hidden) >= 5 for run in case(name).runs), name
        assert all(len(set(run.text)) > 1 for run in case(name).runs), name


@needs_native
@pytest.mark.parametrize("name", ["full, tied head", "mixed", "sliding, symmetric", "yarn"])
def test_transformers_own_loop_equals_ours_in_every_round(case, name):
    built = case(name)
    for prompt, ours, theirs in zip(prompts(), engine_runs(built), built.runs, strict=True):
        native = native_run(built, prompt, NEW)
        assert native.text == ours.text == own_text(built.target, prompt, NEW)
        assert len(native.hidden.keys() & ours.hidden.keys()) >= len(ours.hidden) - 1
        assert gap(native.hidden, ours.hidden) < LOOP
        assert gap(native.hidden, theirs.hidden) < EXACT  # the same target code on both sides


@pytest.mark.parametrize("name", ["everything", "dflash2, everything"])
def test_the_jax_drafter_equals_both_on_real_features(case, name):
    built = case(name)
    params, config = jax_bridge.reference.load_drafter(built.folder)
    run, kept, found = engine_runs(built)[1], None, {}
    for given in run.passes[:3]:  # every round compiles anew
        hidden, kept = jax_bridge.reference.forward(params, config, *map(to_jax, given), kept)
        found[int(given.position[0, -config.block_size])] = torch.tensor(np.asarray(hidden[0, 1:]))
    assert len(found) == 3 and found.keys() <= run.hidden.keys()
    assert gap(found, run.hidden) < EXACT


def to_jax(tensor):
    return jnp.asarray(tensor.to(torch.int32).numpy() if tensor.dtype == torch.int64 else tensor.numpy())


@pytest.mark.parametrize("name", ["full, tied head", "everything", "dflash2, everything"])
def test_the_authors_checkpoint_loads_as_ours(case, name, tmp_path):
    built = case(name)
    built.theirs.save_pretrained(tmp_path)
    back = td.load_drafter(tmp_path)
    assert type(back) is type(built.drafter)
    assert back.config.dflash_config == built.drafter.config.dflash_config
    assert back.config.layer_types == built.drafter.config.layer_types
    for ours, theirs in ((built.drafter, back), (built.drafter, built.theirs)):
        first, second = ours.state_dict(), theirs.state_dict()
        second = {key.replace("codebook.weight", "codebook"): second[key] for key in second}
        assert first.keys() == second.keys()
        assert all(torch.equal(first[key], second[key]) for key in first)


def test_draft_logits_equal_the_authors(case):
    built = Case(
        case("full, tied head").folder / "capped",
        "qwen3",
        {"output_multiplier": 0.3, "final_logit_softcapping": 2.0},
    )
    head = built.target.get_output_embeddings()
    hidden = next(iter(built.runs[0].hidden.values()))[None]
    with torch.no_grad():
        ours, theirs = built.drafter.logits(hidden, head), built.theirs.compute_logits(hidden, head)
    assert ours.abs().max() > 1  # otherwise the cap would do nothing
    assert torch.allclose(ours, theirs, atol=EXACT)


@pytest.mark.parametrize("name", ["dflash2", "dflash2, everything"])
@torch.no_grad()
def test_candidates_and_their_scores_are_the_authors_in_every_round(case, name, monkeypatch):
    """Drafts show the best candidate alone; hooks record the candidates and scores of both sides."""
    built, listed, mine, theirs = case(name), [], [], []
    head, best, likeliest = built.target.get_output_embeddings(), torch.argmax, torch.topk
    spies = {
        "argmax": lambda scores, **how: mine.append(scores) or best(scores, **how),
        "topk": lambda *given, **how: listed.append(likeliest(*given, **how)) or listed[-1],
    }
    monkeypatch.setattr(authors, "_sampling_probs", lambda scores, *_: theirs.append(scores[:, 0]) or scores)
    monkeypatch.setattr(authors, "_sample_probs", lambda scores: best(scores, dim=-1))
    rounds = [
        (hidden[None], torch.tensor([[*prompt, *run.text][start]]))
        for prompt, run in zip(prompts(), built.runs, strict=True)
        for start, hidden in run.hidden.items()
    ]
    for hidden, anchor in rounds:
        for kept in (listed, mine, theirs):
            kept.clear()
        path, candidates, _ = built.theirs.propose(hidden, anchor, head, 1.0)
        with monkeypatch.context() as patch:
            for one, spy in spies.items():
                patch.setattr(torch, one, spy)
            drafts = built.drafter.choose(hidden, anchor, head)
        assert torch.equal(drafts.long(), path) and len(mine) == len(theirs) == hidden.shape[1]
        (own, order), (other, turned) = listed[0].indices.sort(), candidates.sort()
        assert torch.equal(own, other)
        gaps = torch.stack(mine, 1).gather(-1, order) - torch.stack(theirs, 1).gather(-1, turned)
        assert gaps.abs().max() < EXACT
    assert len(rounds) > 10


def test_left_padding_does_not_reach_a_row(case):
    """With the 2-D mask of transformers' contract a padded row of `forward` equals the row alone."""
    built, rows = case("mixed"), 4
    given = built.runs[1].passes[0]
    padded = [torch.cat([part, part.flip(1)]) for part in (given.noise, given.context)]
    junk = torch.randn(2, rows, given.context.shape[2], generator=torch.Generator().manual_seed(0))
    context = torch.cat([junk, padded[1]], dim=1)
    position = torch.cat([torch.zeros(1, rows, dtype=torch.long), given.position], dim=1).expand(2, -1)
    mask = torch.ones(2, position.shape[1], dtype=torch.long)
    mask[:, :rows] = 0
    with torch.no_grad():
        alone = built.drafter(padded[0], padded[1], given.position.expand(2, -1)).last_hidden_state
        masked = built.drafter(padded[0], context, position, mask).last_hidden_state
        leaking = built.drafter(padded[0], context, position).last_hidden_state
    assert (alone - masked).abs().max() < EXACT
    assert (alone - leaking).abs().max() > 1e-3


def test_the_cap_narrows_only_the_authors_last_blocks(case):
    """A tighter cap on both sides changes lengths in the last block alone, if at all."""
    built = case("full, head of its own")
    for new in (2, 7, 13):
        for prompt, ours in zip(prompts(), engine_runs(built, new=new), strict=True):
            theirs = authors_run(built, prompt, new)
            assert ours.text == theirs.text
            lengths = whole(theirs, len(prompt), new, built.drafter.config.block_size)
            assert ours.accepted[: len(lengths)] == lengths
            assert sum(ours.accepted) == sum(theirs.accepted) == new - 1
