"""A row that continues with another prompt gives a fresh row's text and drafts, and reads new tokens only."""

import random
from dataclasses import dataclass

import pytest
import torch
from jaxtyping import Int
from support.refusals import refuses
from support.scripted import own_text, pad
from support.tiny import MASK, make_pair
from torch import Tensor

import torch_dflash as td
from torch_dflash.cache.ring import RingLayer
from torch_dflash.engine.batch import Generation
from torch_dflash.proposers.dflash.proposer import DFlashProposer
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft

NEW, WINDOW = 12, 6
OPTIONS = {"do_sample": False, "eos_token_id": None, "max_new_tokens": NEW}
START = [3, 1, 4, 1, 5, 9, 2, 6] * 4


@register_state
@dataclass(frozen=True)
class Taken:
    committed: Int[Tensor, " B"]


class Counts(td.Proposer):  # a state that cannot go back: eager rounds check its count
    name, width = "counts", 4

    def start(self, plan, device):
        return Taken(torch.zeros(plan.batch_size, dtype=torch.int32, device=device))

    def observe(self, pstate, features, ids, next_ids, count):
        return Taken(pstate.committed + count)

    def propose(self, pstate, anchor, length, embed, head):
        return Draft(anchor[:, None].expand(-1, 3), torch.full_like(length, 3)), pstate


def make_engine(kind, runtime="eager", family="qwen2", **options):
    ring = {"use_sliding_window": True, "sliding_window": WINDOW, "layer_types": ["sliding_attention"] * 2}
    target, drafter = make_pair(family, agree=4.0, **(ring if kind == "ring" else {}))
    drafter = {"ngram": td.NGramProposer(5), "plain": None, "counts": Counts()}.get(kind, drafter)
    # The capacity is a program's size: a ring has to be smaller.
    engine = td.compile(target, drafter, runtime=runtime, **({"max_length": 256} | options))
    empty = engine.pair.proposer.start(engine.plan, "meta")
    assert any(isinstance(layer, RingLayer) for layer in getattr(empty, "layers", ())) == (kind == "ring")
    return engine, target


def ask(session, ids, settled=0, chunks=None, **options):
    got, gains = [], session.gains(ids, settled, **OPTIONS | options)
    for number, gain in enumerate(gains, 1):
        got += gain.tokens
        if number == chunks:
            break
    return got


def fresh(engine, ids, **options):
    out = engine.generate(
        torch.tensor([ids]), torch.ones(1, len(ids)), return_dict_in_generate=True, **OPTIONS | options
    )
    return out.new_tokens[0], out.stats.acceptance_lengths


@pytest.mark.parametrize(
    ("kind", "runtime", "cache", "family"),
    [
        ("dflash", "eager", "static", "qwen2"),  # whose layers have windows
        ("ring", "eager", "paged", "llama"),
        ("counts", "eager", "static", "llama"),
        ("plain", "eager", "paged", "llama"),
        ("dflash", "xla", "paged", "llama"),
        ("ring", "xla", "static", "qwen2"),
    ],
)
def test_a_turn_says_what_a_fresh_row_does_and_reads_what_is_new(kind, runtime, cache, family):
    sizes = {"max_length": 112, "page_size": 16, "rounds_per_chunk": 2}
    engine, target = make_engine(kind, runtime, family, cache=cache, **sizes)
    session, text, seen = engine.session(), START, []
    for question in ([7, 8, 9], [10, 11], [12] * 20):
        got = ask(session, text, len(text) - 2)
        assert got == own_text(target, text, NEW)
        assert session.stats.acceptance_lengths == fresh(engine, text)[1]
        seen.append((len(text), session.stats.prefilled))
        text = text + got + question
    assert seen == [(32, 32), (47, 4), (61, 3)]  # an answer's last token is read with the next turn
    # An early part is edited. Dense keys and values go back to the edit; others to the turn before.
    text = text[:50] + [40, 41]
    assert ask(session, text) == own_text(target, text, NEW)
    forgets = kind in ("ring", "counts")
    assert session.stats.prefilled == (52 - 45 if forgets else 2)
    text = text[:20] + [50]
    assert ask(session, text) == own_text(target, text, NEW)
    assert session.stats.prefilled == (21 if forgets else 1)
    # To the buffer's end: XLA would move a window that ran past the end over held positions.
    text = [*START, *START, 9, 8]
    ask(session, text, max_new_tokens=1)
    text = text + START + [7]
    assert ask(session, text) == own_text(target, text, NEW)
    text = text[:80]
    with torch.no_grad():  # the held rows were computed with other weights
        target.model.layers[0].self_attn.k_proj.weight.mul_(-1)
    assert ask(session, [*text, 8]) == own_text(target, [*text, 8], NEW)
    assert session.stats.prefilled == len(text) + 1


@pytest.mark.parametrize("kind", ["dflash", "ring", "ngram", "plain", "counts"])
def test_turns_that_are_edited_and_left_at_any_point(kind):
    engine, target = make_engine(kind)
    session, draw, text = engine.session(), random.Random(5), START
    for _ in range(16):
        chunks = draw.choice([None, None, 1, 2, 4])
        got = ask(session, text, draw.randint(0, len(text)), chunks)
        wanted, accepted = fresh(engine, text)
        assert got == wanted[: len(got)] and (chunks or len(got) == NEW)
        ours = session.stats.acceptance_lengths[0]
        assert ours == accepted[0][: len(ours)]
        text = text + got
        if draw.random() < 0.5 or len(text) > 220:
            text = text[: draw.randint(1, min(len(text), 160))]
        text = text + [draw.randrange(MASK) for _ in range(draw.randint(0, 9))]
    assert fresh(engine, START)[0] == own_text(target, START, NEW)


@pytest.mark.parametrize("broken", ["earliest", "rewind", "snapshot"])
def test_a_drafter_that_goes_back_wrongly_is_seen(monkeypatch, broken):
    wrong = {
        "earliest": lambda self, pstate, length: 0,
        "rewind": lambda self, pstate, kept, snapshot=None: pstate,
        "snapshot": lambda self, pstate: DFlashProposer.reset(self, pstate, torch.tensor([True])),
    }
    monkeypatch.setattr(DFlashProposer, broken, wrong[broken])
    with pytest.raises((AssertionError, AttributeError)):
        test_turns_that_are_edited_and_left_at_any_point("ring")


def test_rules_know_the_whole_prompt_and_no_more():
    """Presence counts picked tokens and repetition the prompt too, of this request alone."""
    kinds = ("repetition_penalty", "presence_penalty", "min_new_tokens")
    engine, _ = make_engine("dflash", family="llama", processors=kinds)
    asked = {"presence_penalty": 1.5, "repetition_penalty": 1.3, "min_new_tokens": 5}
    session, text = engine.session(), START
    for options in (asked, {}, asked | {"presence_penalty": 3.0}):
        stop = fresh(engine, text, **options)[0][2]
        got = ask(session, text, eos_token_id=[stop], **options)
        assert (got, session.stats.acceptance_lengths) == fresh(engine, text, eos_token_id=[stop], **options)
        assert len(got) >= 5 or not options
        text = text + got + [7, 8]
    assert session.stats.prefilled < 10


def test_samples_are_those_of_a_fresh_row_with_the_same_seed():
    engine, _ = make_engine("dflash", family="llama")
    session, text = engine.session(), START
    for seed in (3, 4):
        options = {"do_sample": True, "temperature": 0.9, "top_p": 0.9, "seed": seed}
        got = ask(session, text, **options)
        assert got == fresh(engine, text, **options)[0]
        text = text + got + [7]
    assert session.stats.prefilled == 2


def test_stop_strings_cut_a_text_that_the_device_had_further():
    """Tokens behind the cut are no part of the text, whatever the state holds."""
    from support.tokenizers import byte_tokenizer

    engine, target = make_engine("dflash", family="llama", rounds_per_chunk=4)
    words = byte_tokenizer()
    wanted = own_text(target, START, NEW)
    stop = {"stop_strings": [words.decode([wanted[1]])], "tokenizer": words}
    session = engine.session()
    got = ask(session, START, **stop)
    assert got == wanted[: len(got)] and len(got) < NEW
    text = START + got + [wanted[len(got)] ^ 1, 8]
    assert ask(session, text) == own_text(target, text, NEW)
    assert session.stats.prefilled == 3


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_other_rows_of_a_batch_stay_idle(cache):
    engine, target = make_engine("ring", family="llama", batch_size=2, cache=cache)
    session, text = engine.session(), START
    for _ in range(2):
        got = ask(session, text, len(text) - 1)
        assert got == own_text(target, text, NEW)
        text = text + got + [9]
    with refuses(ValueError, "num_return_sequences=2", "call generate"):
        session.gains(START, num_return_sequences=2, **OPTIONS | {"do_sample": True})


@pytest.mark.parametrize("cache", ["static", "paged"])
def test_rows_of_a_batch_go_on_together(cache):
    """Each row continues from its own position, on its own pages."""
    engine, target = make_engine("dflash", family="llama", batch_size=2, cache=cache, page_size=16)
    params = engine.runtime.refresh(engine.tensors())

    def run(rows, state=None, kept=None):
        asked = engine.read(*pad(rows), OPTIONS).rows
        begin = (Generation.begin, ()) if state is None else (Generation.go_on, (state,))
        more = () if kept is None else (kept,)
        generation = begin[0](engine.runtime, engine.plan, params, *begin[1], asked, *more)
        while not generation.over:
            progress = generation.step(16, engine._widths)
        assert generation.prefilled == sum(map(len, rows)) - sum(kept or ())
        texts = [
            progress.tokens[row, len(ids) : progress.known[row]].tolist() for row, ids in enumerate(rows)
        ]
        assert texts == [own_text(target, ids, NEW) for ids in rows]
        return generation.state, texts

    rows = [START[:9], [*START, 7]]
    state, texts = run(rows)
    run([[*rows[0], *texts[0], *START], [*rows[1][:30], 5, 6]], state, [20, 30])


def test_a_text_that_was_left_cannot_go_on():
    engine, target = make_engine("plain", family="llama")
    session = engine.session()
    first, second = (session.gains(ids, **OPTIONS) for ids in (START, START[:9]))
    next(first), next(second)
    with refuses(RuntimeError, "was left for a later request"):
        next(first)
    rest = [token for gain in second for token in gain.tokens]
    assert rest == own_text(target, START[:9], NEW)[1:]


def test_an_error_in_a_step_loses_the_state_and_nothing_else(monkeypatch):
    engine, target = make_engine("dflash", family="llama")
    session = engine.session()
    got = ask(session, START)
    with monkeypatch.context() as patched, pytest.raises(MemoryError):
        patched.setattr(Generation, "advance", lambda *_: (_ for _ in ()).throw(MemoryError))
        ask(session, START + got)
    text = START + got + [7]
    assert ask(session, text) == own_text(target, text, NEW)
    assert session.stats.prefilled == len(text)


def test_snapshots_are_few(monkeypatch):
    monkeypatch.setattr("torch_dflash.engine.session.SNAPSHOTS", 2)
    engine, target = make_engine("ring", family="llama")
    session, text = engine.session(), START
    for _ in range(4):
        text = text + ask(session, text, len(text) - 1) + [7]
    assert len(session._snapshots) == 2
    for cut, kept in ((60, 57), (34, 0)):  # behind the last but one; before all that are left
        text = text[:cut] + [1]
        assert ask(session, text) == own_text(target, text, NEW)
        assert session.stats.prefilled == cut + 1 - kept
