"""Trees of a drafter's block, and of lookup and drafter, give the same text in fewer rounds."""

from functools import cache

import pytest
import torch
from support.authors import SECOND
from support.own_texts import OwnTexts
from support.refusals import refuses
from support.scripted import pad, run
from support.tabled import Tabled, with_path
from support.tiny import make_drafter, make_pair

import jax_bridge as jb
import torch_dflash as td
from torch_dflash.decode import Verified
from torch_dflash.engine.saved import check_plan, describe_plan
from torch_dflash.ops.trees import take_rows

PROMPTS = [[5, 17, 80, 33] * 3, [3, 1, 4], [9, 2, 6, 40, 41, 42, 9, 2, 6]]
NEW = 24
SAMPLED = {"do_sample": True, "temperature": [0.0, 1.0, 4.0], "top_k": 0, "seed": 3}
SIZES = {"max_length": 64, "batch_size": 3}


@cache
def pair():
    return make_pair("llama", agree=6.0)


TEXTS = OwnTexts(lambda: pair()[0], PROMPTS, NEW, SAMPLED, SIZES)
own, sampled, made, check = TEXTS.own, TEXTS.sampled, TEXTS.made, TEXTS.check


def lookup(width=16):
    return td.NGramProposer(width)


@pytest.mark.parametrize("kind", ["dflash", "narrow", "markov", "dflash2"])
def test_text_is_the_targets_own(kind):
    target, drafter = pair()
    if kind == "narrow":
        drafter = td.with_draft_vocabulary(drafter, target, list(range(0, 90, 3)))
    elif kind != "dflash":
        drafter = make_drafter(target, **({"markov_rank": 4} if kind == "markov" else SECOND))
    check(made(td.TreeProposer(drafter, rows=16)))


def test_a_union_says_the_same_in_both_runtimes():
    union = td.Union(lookup(), pair()[1], rows=8)
    kinds = "repetition_penalty", "frequency_penalty", "no_repeat_ngram_size"
    engines = [made(union, runtime, cache="paged", processors=kinds) for runtime in ("eager", "xla")]
    greedy, drawn = check(engines[0])
    also, as_drawn = check(engines[1])
    assert also.acceptance_lengths == greedy.acceptance_lengths
    assert as_drawn.acceptance_lengths == drawn.acceptance_lengths
    rules = {"repetition_penalty": 1.3, "frequency_penalty": 0.5, "no_repeat_ngram_size": 3}
    rules |= {"max_new_tokens": NEW, "do_sample": False}
    plain = made(None, processors=kinds)
    wanted = run(plain, PROMPTS, **rules)[0]
    assert [run(engine, PROMPTS, **rules)[0] for engine in engines] == [wanted] * 2
    assert wanted != [own(row) for row in range(3)]
    state = engines[0].start(*pad(PROMPTS), max_new_tokens=NEW, eos_token_id=None, do_sample=False)
    state = engines[1].advance(jb.state_to_jax(engines[0].advance(state)))  # and over the border again
    state = jb.state_to_torch(state)
    while not state.done.all():
        state = engines[0].advance(state)
    for row, prompt in enumerate(PROMPTS):
        assert state.tokens[row, len(prompt) : len(prompt) + NEW].tolist() == own(row)
    chain = run(made(pair()[1]), PROMPTS, max_new_tokens=NEW, do_sample=False)[1]
    assert greedy.mean_acceptance_length > chain.mean_acceptance_length


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_half_precision_says_the_same(cache):
    """Each product of a tree's rows is rounded once, as in plain decoding."""
    sizes, differ = {"max_length": 64, "batch_size": 3, "runtime": "eager", "cache": cache}, 0
    for seed in range(2):
        target, drafter = (one.bfloat16() for one in make_pair("llama", seed=seed, agree=6.0))
        engines = [td.compile(target, one, **sizes) for one in (None, td.TreeProposer(drafter, rows=8))]
        plain, tree = (run(one, PROMPTS, max_new_tokens=NEW, do_sample=False)[0] for one in engines)
        differ += sum(map(list.__ne__, plain, tree))
    assert differ == 0


def test_rules_that_read_text_stand_beside_the_tree_of_one_prompt():
    asked = {"max_new_tokens": NEW, "do_sample": False, "no_repeat_ngram_size": 2}
    drafters = None, td.TreeProposer(pair()[1], rows=8)
    texts = [
        td.generate(pair()[0], one, torch.tensor([PROMPTS[0]]), runtime="eager", **asked) for one in drafters
    ]
    assert texts[0].equal(texts[1])


def test_64_rows_hold_all_that_either_drafts():
    greedy, drawn = check(made(td.Union(lookup(), pair()[1], rows=64)))
    for alone in (lookup(), pair()[1]):
        engine = made(alone)
        less, fewer = (run(engine, PROMPTS, max_new_tokens=NEW, **o)[1] for o in ({}, SAMPLED))
        assert greedy.mean_acceptance_length >= less.mean_acceptance_length
        assert drawn.mean_acceptance_length >= fewer.mean_acceptance_length


def test_a_users_tree_is_merged():
    proposer = Tabled(3, 80, 8, 4)
    proposer.fill([p + own(row) for row, p in enumerate(PROMPTS)], with_path(7, 4))
    engine = made(td.Union(lookup(4), proposer, rows=16))
    texts, stats = run(engine, PROMPTS, max_new_tokens=NEW, do_sample=False)
    assert texts == [own(row) for row in range(3)]
    assert stats.mean_acceptance_length > 3


def test_a_narrower_round_has_a_tree_of_its_own():
    tree = td.TreeProposer(pair()[1], rows=16)
    narrow = made(tree, verify_width=4)
    few = made(td.TreeProposer(pair()[1], rows=4))
    assert check(narrow)[0].acceptance_lengths == check(few)[0].acceptance_lengths


def test_the_drafters_buffers_are_as_long_as_a_path():
    for rows, deepest in ((64, 15), (8, 7)):
        engine = made(td.Union(lookup(), pair()[1], rows=rows))
        state = engine.start(torch.tensor([[5, 17]] * 3), max_new_tokens=8, do_sample=False)
        assert engine.plan.depth == deepest and engine.plan.gain == deepest + 1
        assert state.proposer.parts[-1].context.shape[1] == deepest + 1


def drafters_keys(engine, ids, new):
    """The drafter's keys and values of the first rounds' committed tokens, and the number of tokens."""
    state = engine.start(torch.tensor([ids]), max_new_tokens=new, do_sample=False, eos_token_id=None)
    while not state.done.all():
        state = engine.advance(state)
    inner = state.proposer.parts[-1] if hasattr(state.proposer, "parts") else state.proposer
    held = [torch.cat([layer.key, layer.value], dim=-1)[0] for layer in inner.layers]
    return torch.stack(held), int(inner.length[0]), state.tokens[0].tolist()


def test_the_drafter_has_taken_in_the_path_alone(monkeypatch):
    """The drafter's keys and values are those of the committed text, not of a rejected branch."""
    tree = td.compile(pair()[0], td.TreeProposer(pair()[1], rows=16), runtime="eager", max_length=64)
    chain = td.compile(pair()[0], pair()[1], runtime="eager", max_length=64)
    held, count, tokens = drafters_keys(tree, PROMPTS[0], NEW)
    wanted, known, same = drafters_keys(chain, PROMPTS[0], NEW)
    assert tokens[: len(PROMPTS[0]) + NEW] == same[: len(PROMPTS[0]) + NEW]
    both = min(count, known)
    assert both > len(PROMPTS[0]) + 8
    torch.testing.assert_close(held[:, :, :both], wanted[:, :, :both], rtol=1e-4, atol=1e-5)
    along = Verified.along

    def off(self, path):
        return along(self, path)._replace(features=take_rows(self.features, (path + 1).clamp(max=15)))

    monkeypatch.setattr(Verified, "along", off)
    wrong, count, _ = drafters_keys(tree, PROMPTS[0], NEW)
    assert not torch.allclose(wrong[:, :, : min(count, known)], wanted[:, :, : min(count, known)], atol=1e-3)


def test_a_state_of_another_tree_says_what_to_compile_with():
    first, second = (made(one).plan for one in (td.TreeProposer(pair()[1], rows=8), pair()[1]))
    with refuses(ValueError, "a state: the state has", "compile with the proposer, and its rows="):
        check_plan(describe_plan(first), second, "a state")
