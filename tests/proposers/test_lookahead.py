"""Lookahead decoding keeps the text, and drafts as its definition in plain lists."""

import random
from dataclasses import fields
from functools import cache

import pytest
import torch
from support.own_texts import OwnTexts
from support.refusals import refuses
from support.scripted import own_text, pad, run
from support.states import look
from support.tiny import small_pair

import torch_dflash as td
from torch_dflash.engine.saved import describe_proposer
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.lookahead import LookaheadProposer

PROMPTS = [[5, 17, 80, 33] * 2, [3, 1, 4], [9]]
NEW = 24
SAMPLED = {"do_sample": True, "temperature": [0.0, 0.3, 1.0], "top_k": 0, "seed": 3}
SIZES = {"max_length": 64, "batch_size": 3}
SHAPES = [(3, 4, 2), (2, 3, 1), (4, 1, 3)]


@cache
def target():
    return small_pair("llama", agree=8.0)[0]


TEXTS = OwnTexts(target, PROMPTS, NEW, SAMPLED, SIZES)
own, sampled = TEXTS.own, TEXTS.sampled


def made(runtime="eager", **options):
    return TEXTS.made(LookaheadProposer(3, 4, 2), runtime, **options)


class Lists:
    """One row of lookahead decoding, by its definition: no tensor, no ring, no mask."""

    def __init__(self, ngram, window, guesses):
        self.n, self.w, self.g = ngram, window, guesses
        self.text, self.pool = [0] * (ngram - 1) * window, []
        self.levels = None

    def read(self, ids):
        self.text = (self.text + ids)[-(self.n - 1) * self.w :]
        self.levels = [self.text[j * self.w :][: self.w] for j in range(self.n - 1)]

    def paths(self, anchor):
        """The drafted paths after the anchor, a node each."""
        found = []
        for gram in [gram for gram in self.pool if gram[0] == anchor][: self.g]:
            found += [gram[1 : 2 + at] for at in range(self.n - 1)]
        found += [[anchor] * (1 + at) for at in range(self.n - 1)] * (self.g - len(found) // (self.n - 1))
        for w in range(self.w):
            trunk = self.levels[0][: w + 1]
            later = [self.levels[j][w] for j in range(1, self.n - 1)]
            found += [trunk + later[:at] for at in range(self.n - 1)]
        return found

    def went(self, after, gained):
        """Take in ``after[path]``, the target's picks, and the number of committed tokens."""
        fresh = []
        for w in range(self.w):
            column = [self.levels[j][w] for j in range(1, self.n - 1)]
            fresh.append(after[tuple(self.levels[0][: w + 1] + column)])
        levels = [*self.levels, fresh]
        for w in reversed(range(self.w)):
            gram = [level[w] for level in levels]
            self.pool = [gram, *(one for one in self.pool if one != gram)]
        moved = [min(w + gained - 1, self.w - 1) for w in range(self.w)]
        self.levels = [[level[w] for w in moved] for level in levels[1:]]


def drafts_as_the_lists_say(shape):
    proposer, draw, rows = LookaheadProposer(*shape), random.Random(4), 2
    plan = DecodePlan(rows, 64, proposer.width, proposer.width, depth=proposer.depth)
    state, lists = proposer.start(plan, "cpu"), [Lists(*shape) for _ in range(rows)]
    prompts = [[draw.randrange(5) for _ in range(count)] for count in (9, 2)]
    for piece in (slice(0, 4), slice(4, 9)):
        ids, mask = pad([prompt[piece] for prompt in prompts], "right")
        state = proposer.ingest(state, None, ids, ids, mask.sum(1).int())
    for row, prompt in zip(lists, prompts, strict=True):
        row.read(prompt)
    for _ in range(24):
        anchor = torch.tensor([draw.randrange(5) for _ in lists], dtype=torch.int32)
        draft, state = proposer.propose(state, anchor, state.length, None, None)
        assert draft.tokens.dtype == torch.int32 and draft.valid.tolist() == [proposer.width - 1] * rows
        picks, gained = torch.zeros(rows, proposer.width, dtype=torch.int32), []
        for at, row in enumerate(lists):
            paths = [()]
            for token, above in zip(draft.tokens[at].tolist(), draft.parent[at].tolist(), strict=True):
                paths.append((*paths[above + 1], token))
            assert [list(path) for path in paths[1:]] == row.paths(int(anchor[at]))
            after = {path: draw.randrange(5) for path in paths}
            picks[at] = torch.tensor([after[path] for path in paths])
            gained.append(draw.choice([0, 1, 1, 2, 3]))
            if gained[-1]:
                row.went(after, gained[-1])
        ids = torch.cat([anchor[:, None], draft.tokens], dim=1)
        state = proposer.verified(state, ids, picks)
        state = proposer.observe(state, None, ids[:, :3], picks[:, :3], torch.tensor(gained))
        for at, row in enumerate(lists):
            assert state.window[at].tolist() == row.levels
    assert state.length.tolist() != [9, 2]


@pytest.mark.parametrize("shape", SHAPES)
def test_drafts_are_those_of_the_definition(shape):
    drafts_as_the_lists_say(shape)


@pytest.mark.parametrize("broken", ["by one", "a level late", "twice"])
def test_a_window_that_is_moved_wrongly_is_seen(monkeypatch, broken):
    right = LookaheadProposer.observe

    def wrong(self, pstate, features, ids, next_ids, count):
        if broken == "a level late":
            pstate = type(pstate)(**vars(pstate) | {"fresh": torch.full_like(pstate.fresh, -1)})
        count = {"by one": count.clamp(max=1), "twice": count * 2}.get(broken, count)
        return right(self, pstate, features, ids, next_ids, count)

    monkeypatch.setattr(LookaheadProposer, "observe", wrong)
    with pytest.raises(AssertionError):
        drafts_as_the_lists_say(SHAPES[0])


def check(engine):
    greedy, drawn = TEXTS.check(engine)
    return greedy.acceptance_lengths, drawn.acceptance_lengths


def test_a_window_of_one_is_saved(tmp_path):
    """Its arrays have an axis of one entry, whose stride no type of bytes may follow."""
    target, ids = TEXTS.target(), torch.tensor(PROMPTS[:1])
    engine = td.compile(target, LookaheadProposer(3, 1, 2), runtime="eager", max_length=64)
    state = engine.advance(engine.start(ids, max_new_tokens=NEW, eos_token_id=None, do_sample=False))
    td.save_state(state, tmp_path / "state", engine)
    state = td.load_state(tmp_path / "state", engine)
    while not state.done.all():
        state = engine.advance(state)
    assert state.tokens[0, len(PROMPTS[0]) :][:NEW].tolist() == own(0)


def test_text_is_the_targets_own_in_both_runtimes(tmp_path):
    eager, lowered = made(), made("xla")
    accepted = check(eager)
    assert check(lowered) == accepted
    assert max(map(max, accepted[0])) > 2  # of random text that repeats itself
    # Begun eagerly, saved, and finished on the other runtime.
    given = {"max_new_tokens": NEW, "eos_token_id": None, "do_sample": False}
    state = eager.advance(eager.start(*pad(PROMPTS), **given))
    td.save_state(state, tmp_path / "state", eager)
    for engine in (eager, lowered):
        state = td.load_state(tmp_path / "state", engine)
        while not look(engine.runtime, state).done.all():
            state = engine.advance(state)
        seen = look(engine.runtime, state)
        for row, prompt in enumerate(PROMPTS):
            assert seen.tokens[row, len(prompt) :][:NEW].tolist() == own(row)
            assert seen.accepted[row, : seen.rounds[row]].tolist() == accepted[0][row]


@pytest.mark.parametrize("options", [{"verify_width": 6}, {"verify_width": 1}, {"cache": "paged"}])
def test_text_is_the_targets_own_in_other_rounds(options):
    check(made(**options))


def test_a_reset_row_is_as_begun_and_the_others_stay():
    begun = made().start(*pad(PROMPTS), max_new_tokens=NEW, do_sample=False)
    proposer = LookaheadProposer(3, 4, 2)
    state = proposer.verified(begun.proposer, *(torch.ones(3, proposer.width),) * 2)
    state = proposer.observe(state, None, begun.tokens, begun.tokens, torch.tensor([1, 2, 1]))
    again = proposer.reset(state, torch.tensor([True, False, False]))
    empty = proposer.start(made().plan, "cpu")
    for field in fields(again):
        now, then, first = (getattr(one, field.name) for one in (again, state, empty))
        assert now[0].equal(first[0]) and now[1:].equal(then[1:])


def test_a_chat_goes_back_to_any_token():
    engine = made(batch_size=1)
    session, text = engine.session(), PROMPTS[0]
    asked = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None}
    for kept, more in ((99, [7, 8]), (12, [40]), (3, [])):
        text = text[:kept] + more
        got = [token for gain in session.gains(text, 0, **asked) for token in gain.tokens]
        assert got == own_text(target(), text, 8)
        text = text + got
    assert session.stats.prefilled == 1


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"ngram": 1}, "ngram=1: must be an integer from 2 to 63"),
        ({"window": 0}, "window=0: must be an integer from 1 to 63"),
        ({"guesses": 2.5}, "guesses=2.5: must be an integer"),
        ({"ngram": 5, "window": 15, "guesses": 15}, "ngram=5, window=15, guesses=15: a tree of 121 rows"),
    ],
)
def test_arguments_out_of_range_are_named(given, words):
    with refuses(ValueError, words):
        LookaheadProposer(**given)


def test_a_union_refuses_it_by_name():
    union = td.Union(td.NGramProposer(4), LookaheadProposer(3, 4, 2), rows=8)
    with refuses(ValueError, "LookaheadProposer", "pass it as drafter itself"):
        run(td.compile(target(), union, runtime="eager", **SIZES), PROMPTS, max_new_tokens=4)


def test_equal_arguments_share_an_engine_and_a_state_names_them():
    assert LookaheadProposer(3, 4, 2).key == LookaheadProposer(3, 4, 2).key != LookaheadProposer(3, 4, 1).key
    assert "ngram=3, window=4, guesses=2" in describe_proposer(made())
