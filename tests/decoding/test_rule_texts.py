"""The text of a call with any options is that of plain decoding; a misled processor changes the text."""

from functools import cache

import pytest
import torch
from decoding.test_rule_kinds import OPTIONS, VOCAB
from hypothesis import example, given, settings
from hypothesis import strategies as st
from support.scripted import Scripted, pad
from support.tabled import Tabled, with_path
from support.tiny import make_target

import torch_dflash as td
from torch_dflash.processors.interface import process
from torch_dflash.requests.rules import KINDS

NEW, WIDTH, STOP = 9, 4, 0
NAMES = [name for name in KINDS if name not in ("grammar", "no_repeat_ngram_size")]
PROCESSORS = (*NAMES, td.processors.NoRepeatNgram(8))
OURS = {"presence_penalty": st.sampled_from([-2.0, 1.5]), "frequency_penalty": st.sampled_from([-1.0, 2.0])}
DRAWN = {name: values for name, (values, _) in OPTIONS.items()} | OURS
RULES = st.sets(st.sampled_from(list(DRAWN)), min_size=1, max_size=4).flatmap(
    lambda names: st.fixed_dictionaries({name: DRAWN[name] for name in sorted(names)})
)
SAMPLED = st.fixed_dictionaries(
    {"do_sample": st.just(True), "temperature": st.sampled_from([0.7, 1.5]), "seed": st.integers(0, 99)},
    optional={
        "top_k": st.integers(2, 8),
        "top_p": st.sampled_from([0.7, 0.95]),
        "min_p": st.sampled_from([0.05, 0.2]),
        "typical_p": st.sampled_from([0.5, 0.9]),
        "epsilon_cutoff": st.sampled_from([0.05, 0.2]),
        "eta_cutoff": st.sampled_from([0.05, 0.3]),
    },
)
PROMPT = st.lists(st.integers(1, VOCAB - 1), min_size=5, max_size=5)


@cache
def target():
    """A target whose next token depends on the text before."""
    model = make_target("llama", vocab_size=VOCAB, hidden_size=16, num_hidden_layers=2, seed=7)
    with torch.no_grad():
        model.get_output_embeddings().weight *= 2
        model.get_output_embeddings().weight[STOP] *= 0.1
    return model


@cache
def engines(runtime):
    """(An engine whose drafts a test writes, its proposer, an engine without drafts)."""
    proposer = Scripted(2, 48, WIDTH)
    fixed = {"max_length": 32, "batch_size": 2, "prefill_chunk_size": 16, "rounds_per_chunk": 2}
    drafting, plain = (
        td.compile(target(), drafter, runtime=runtime, processors=PROCESSORS, **fixed)
        for drafter in (proposer, None)
    )
    return drafting, proposer, plain


def texts(engine, prompts, options):
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": STOP, "pad_token_id": STOP}
    out = engine.generate(*pad(prompts), return_dict_in_generate=True, **asked | options)
    return out.new_tokens, out.stats


def theirs(prompts, options):
    asked = {"max_new_tokens": NEW, "do_sample": False, "eos_token_id": STOP, "pad_token_id": STOP} | options
    rows = [
        target().generate(torch.tensor([prompt]), **asked)[0, len(prompt) :].tolist() for prompt in prompts
    ]
    return rows


def drafted(runtime, prompts, options, known, wrong):
    """The text where ``known`` is drafted, other ids at the places ``wrong``."""
    drafting, proposer, _ = engines(runtime)
    rows = [[(token + (at in wrong)) % VOCAB for at, token in enumerate(row)] for row in known]
    proposer.say([prompt + row for prompt, row in zip(prompts, rows, strict=True)])
    return texts(drafting, prompts, options)


@pytest.mark.parametrize(("runtime", "examples"), [("eager", 40), ("xla", 40)])
def test_any_options_together_leave_the_text_of_plain_decoding(runtime, examples):
    seen, used = [], set()

    @settings(max_examples=examples)
    @example(
        {"presence_penalty": -2.0, "frequency_penalty": 2.0}, {}, [[1, 2, 3, 4, 5], [5, 4, 3, 2, 1]], {1}
    )
    @given(
        RULES,
        st.one_of(st.just({}), SAMPLED),
        st.lists(PROMPT, min_size=2, max_size=2),
        st.sets(st.integers(0, NEW)),
    )
    def check(rules, sampled, prompts, wrong):
        if "forced_eos_token_id" in rules:  # refused with these, where both hold for the same token
            rules.pop("suppress_tokens", None)
        options = rules | sampled
        plain, _ = texts(engines(runtime)[2], prompts, options)
        found, stats = drafted(runtime, prompts, options, plain, wrong)
        assert found == plain
        if not sampled and not rules.keys() & OURS.keys():
            assert plain == theirs(prompts, rules)
        used.update(options)
        seen.extend(stats.whole_rounds)

    check()
    assert {1, WIDTH} <= set(seen)  # drafts were kept and thrown away
    if settings.default and settings.default.derandomize:  # other examples may lack a kind
        assert used >= {*DRAWN, *KINDS} - {"grammar", "forced_bos_token_id"}


@cache
def branching():
    proposer = Tabled(2, 48, rows=8, depth=3)
    fixed = {"max_length": 32, "batch_size": 2, "prefill_chunk_size": 16, "rounds_per_chunk": 2}
    return td.compile(target(), proposer, runtime="eager", processors=PROCESSORS, **fixed), proposer


def branched(prompts, options, known):
    """The text where ``known`` is hidden in a branch of each tree."""
    engine, proposer = branching()
    whole = [prompt + row for prompt, row in zip(prompts, known, strict=True)]
    proposer.fill(whole, with_path(7, 3, vocab=VOCAB))
    return texts(engine, prompts, options)


def test_any_options_together_leave_the_text_where_drafts_are_trees():
    seen = []

    @settings(max_examples=25)
    @given(RULES, st.one_of(st.just({}), SAMPLED), st.lists(PROMPT, min_size=2, max_size=2))
    def check(rules, sampled, prompts):
        if "forced_eos_token_id" in rules:
            rules.pop("suppress_tokens", None)
        options = rules | sampled
        plain, _ = texts(engines("eager")[2], prompts, options)
        found, stats = branched(prompts, options, plain)
        assert found == plain
        seen.extend(stats.whole_rounds)

    check()
    assert {1, 3, 4} <= set(seen)


RAGGED = [[3, 1, 4, 1, 5, 2], [2, 7, 1]]
SHARP = {
    "SequenceBias": {"sequence_bias": [[[first, (first * 5 + 3) % 8 + 1], 30.0] for first in range(1, 9)]},
    "NoRepeatNgram": {"no_repeat_ngram_size": 2},
    "Bans": {"bad_words_ids": [[first, last] for first in range(9) for last in (first, (first + 4) % 9, 8)]},
    "ForcedTokens": {"forced_eos_token_id": 7},
    "LengthDecay": {"exponential_decay_length_penalty": (3, 9.0)},
    "RepetitionPenalty": {"repetition_penalty": 2.5},
    "OccurrencePenalty": {"presence_penalty": 3.0, "frequency_penalty": 2.0},
}
MEMORIES = ("RepetitionPenalty", "OccurrencePenalty")
# The misread text before a row; for kinds that remember, the input of the memory.
BROKEN_TEXT = {
    "a draft that is not accepted yet": lambda text: text._replace(length=text.length + 1),
    "one row off": lambda text: text._replace(length=text.length - 1),
    "a neighbour's": lambda text: text._replace(tokens=text.tokens.roll(1, 0), length=text.length.roll(1, 0)),
}
BROKEN_MEMORY = {
    "a draft that was rejected": lambda ids, count: (ids, torch.full_like(count, ids.shape[1])),
    "one row off": lambda ids, count: (ids, (count - 1).clamp(min=0)),
    "a neighbour's": lambda ids, count: (ids.roll(1, 0), count.roll(1, 0)),
}
WAYS = [(kind, how) for kind in SHARP for how in (BROKEN_MEMORY if kind in MEMORIES else BROKEN_TEXT)]


@pytest.mark.parametrize(("name", "how"), WAYS)
def test_a_processor_that_sees_something_else_shows(monkeypatch, name, how):
    kind, options = getattr(td.processors, name), SHARP[name]
    want, _ = texts(engines("eager")[2], RAGGED, options)
    assert name == "OccurrencePenalty" or want == theirs(RAGGED, options)
    wrong = {1, 3, 5}
    assert drafted("eager", RAGGED, options, want, wrong)[0] == want != theirs(RAGGED, {})
    if name in MEMORIES:
        observe, change = kind.observe, BROKEN_MEMORY[how]
        monkeypatch.setattr(
            kind, "observe", lambda self, memory, *told: observe(self, memory, *change(*told))
        )
    else:
        call, change = kind.__call__, BROKEN_TEXT[how]
        monkeypatch.setattr(
            kind, "__call__", lambda self, memory, text, logits: call(self, memory, change(text), logits)
        )
    assert drafted("eager", RAGGED, options, want, wrong)[0] != want


@pytest.mark.parametrize("name", SHARP)
def test_a_rule_that_takes_a_tree_for_a_chain_shows(monkeypatch, name):
    """The wrong rule counts siblings, and takes a row's number for its place in the text."""
    options = {"RepetitionPenalty": {"repetition_penalty": 9.0}}.get(name, SHARP[name])
    want, _ = texts(engines("eager")[2], RAGGED, options)
    assert branched(RAGGED, options, want)[0] == want

    def in_order(processors, memories, text, logits, scaled=False):
        if text.tree is not None:
            row = torch.arange(logits.shape[1], dtype=torch.int32)
            tree = text.tree._replace(end=torch.full_like(text.tree.end, len(row)))
            text = text._replace(tree=tree, length=text.length[:, :1] + row)
        return process(processors, memories, text, logits, scaled)

    monkeypatch.setattr("torch_dflash.decode.process", in_order)
    assert branched(RAGGED, options, want)[0] != want
