"""`verify_width="auto"`: rounds of every width share a state, and the chosen width gains most."""

import math
from collections import deque
from dataclasses import replace

import pytest
import torch
from support.scripted import Scripted, own_text, run
from support.states import look
from support.tiny import make_pair, small_pair
from support.widths import mix

import torch_dflash as td
from torch_dflash.checks import check_width
from torch_dflash.decode import draft
from torch_dflash.engine.width import (
    ALLOWANCE,
    KEPT,
    LOOK,
    SHARE,
    TRIALS,
    UNLIMITED,
    Pace,
    TreeWidths,
    Widths,
    ladder,
)
from torch_dflash.proposers.dflash.proposer import DFlashProposer
from torch_dflash.runtime import Rounds

PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [3, 1, 4]]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
MIXED = (1, 6, 1, 1, 4, 6, 1, 1, 1, 1, 1, 1, 1, 1, 6, 4, 1)


def mixed(pair, where: str, **options):
    engine = td.compile(*pair, runtime=where, max_length=96, verify_width="auto", **options)
    mix(engine, MIXED)
    return engine


@pytest.mark.parametrize(
    ("where", "kind", "cache"),
    [("eager", kind, cache) for kind in ("dflash", "ring", "ngram") for cache in ("static", "paged")]
    + [("xla", "dflash", "static"), ("xla", "ring", "paged")],
)
def test_rounds_of_all_widths_say_the_targets_own_text(where, kind, cache):
    target, drafter = make_pair("llama", agree=6.0, **(WINDOW if kind == "ring" else {}))
    proposer = td.NGramProposer(6) if kind == "ngram" else drafter
    engine = mixed((target, proposer), where, batch_size=2, cache=cache)
    texts, stats = run(engine, PROMPTS, max_new_tokens=60, do_sample=False)
    assert texts == [own_text(target, prompt, 60) for prompt in PROMPTS]
    assert set(engine._widths.used) == set(stats.widths) == {1, 4, 6}
    assert sum(stats.widths.values()) == stats.rounds
    sampled = {"max_new_tokens": 40, "do_sample": True, "seed": 3}
    whole = td.compile(target, drafter, runtime=where, max_length=96, batch_size=2)
    assert run(engine, PROMPTS, **sampled)[0] == run(whole, PROMPTS, **sampled)[0]


@pytest.mark.parametrize("kind", ["full", "ring"])
def test_rounds_of_any_width_leave_the_drafter_as_a_prompt_does(kind, monkeypatch):
    target, drafter = make_pair("llama", agree=6.0, **(WINDOW if kind == "ring" else {}))

    def drafts_differ() -> bool:
        """Whether mixed rounds ever leave another draft than the same text read as a prompt."""
        engine = mixed((target, drafter), "eager")
        params = engine.tensors()
        state = engine.start(torch.tensor(PROMPTS[:1]), max_new_tokens=60, do_sample=False, eos_token_id=None)
        differ = []
        for width in MIXED * 2:
            state = engine.runtime.advance(params, state, Rounds(width, 1))
            said = state.tokens[:, : int(state.length[0]) + 1]
            fresh = engine.start(said[:, :-1].long(), max_new_tokens=8, do_sample=False, eos_token_id=None)
            assert torch.equal(fresh.anchor, state.anchor)
            drafted = lambda pair, at: draft(pair, at)[0].tokens  # noqa: E731
            differ.append(not torch.equal(*(engine.pair.run(drafted, params, at) for at in (state, fresh))))
        return any(differ)

    assert not drafts_differ()

    def flush_nothing(self, pstate, *_):
        return self._flush(replace(pstate, context=torch.zeros_like(pstate.context)))

    monkeypatch.setattr(DFlashProposer, "skip", flush_nothing)
    assert drafts_differ()
    monkeypatch.setattr(DFlashProposer, "skip", lambda self, pstate, *_: pstate)
    with pytest.raises(RuntimeError, match="out of bounds"):  # a buffer that no round empties
        drafts_differ()


def test_switching_compiles_nothing():
    target, drafter = small_pair("llama", agree=6.0)
    engine = mixed((target, drafter), "xla").warmup()
    for new in (20, 50):
        texts, stats = run(engine, PROMPTS[:1], max_new_tokens=new, do_sample=False)
        assert stats.compilations == 0 and texts == [own_text(target, PROMPTS[0], new)]
    assert set(engine._widths.used) == {1, 4, 6}


def test_a_state_moves_between_fixed_and_chosen_widths(tmp_path):
    target, drafter = make_pair("llama", agree=6.0)
    options = {"runtime": "eager", "max_length": 96, "rounds_per_chunk": 2}
    chosen = td.compile(target, drafter, verify_width="auto", **options)
    fixed = td.compile(target, drafter, **options)
    ids, asked = torch.tensor(PROMPTS[:1]), {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    state = chosen.runtime.advance(chosen.tensors(), chosen.start(ids, **asked), Rounds(1, 3))
    td.save_state(state, tmp_path / "state", chosen)
    state = td.load_state(tmp_path / "state", fixed)
    while not look(fixed.runtime, state).done.all():
        state = fixed.advance(state)
    seen = look(fixed.runtime, state)
    assert seen.tokens[0, len(PROMPTS[0]) : seen.length[0] + 1].tolist() == own_text(target, PROMPTS[0], 40)


COSTS = {  # of a round, in plain rounds: measured in bfloat16 without AMX, and nearly flat
    "steep": {1: 1.0, 2: 1.3, 4: 1.45, 8: 1.75, 16: 2.2},
    "flat": {1: 1.0, 2: 1.05, 4: 1.1, 8: 1.15, 16: 1.2},
}
KINDS = {"chat": 0.25, "prose": 0.42, "code": 0.6, "maths": 0.75}


def simulate(widths: Widths, costs: dict[int, float], chance: float, tokens: int, seed: int = 0):
    """One generation, each draft accepted at random: (time over that of plain decoding, turns)."""
    generator = torch.Generator().manual_seed(seed)
    pace, turns, said, spent = Pace(), [], 0, 0.0
    while said < tokens:
        turn = widths.next(pace)
        assert 1 <= turn.rounds <= 16
        luck = (torch.rand(turn.rounds, max(costs), generator=generator) < chance).tolist()
        counts = [([*row[: turn.width - 1], False]).index(False) + 1 for row in luck]
        widths.note(turn, turn.rounds * costs[turn.width], [counts], pace)
        turns.append(turn)
        said, spent = said + sum(counts), spent + turn.rounds * costs[turn.width]
    return spent / said, turns


def warmed(costs: dict[int, float]) -> Widths:
    """Widths as after `Engine.warmup`: all costs, and no text."""
    widths, pace = Widths(ladder(max(costs)), 16), Pace(ahead=UNLIMITED)
    while not widths.measured:
        turn = widths.next(pace)
        widths.note(turn, turn.rounds * costs[turn.width], [[1] * turn.rounds], pace)
    widths.forget_text()
    return widths


def share(turns: list[Rounds], width: int) -> float:
    return sum(t.rounds for t in turns if t.width == width) / sum(t.rounds for t in turns)


@pytest.mark.parametrize(
    "costs, chance, best",
    [
        ({1: 1.0, 2: 1.05, 4: 1.1, 8: 1.2}, 0.9, 8),  # flat: all of it pays
        ({1: 1.0, 2: 1.1, 4: 1.3, 8: 2.2}, 0.6, 4),
        ({1: 1.0, 2: 1.5, 4: 1.8, 8: 2.5}, 0.3, 1),  # nothing pays
    ],
)
@pytest.mark.parametrize("start", [warmed, lambda costs: Widths(ladder(max(costs)), 16)], ids=["warm", "new"])
def test_the_width_that_gains_most_is_chosen(costs, chance, best, start):
    widths = start(costs)
    _, turns = simulate(widths, costs, chance, 3000)
    assert share(turns, best) > 0.85
    assert widths.expected(best) == pytest.approx(sum(chance**k for k in range(best)), rel=0.35)


@pytest.mark.parametrize("costs", COSTS.values(), ids=COSTS)
@pytest.mark.parametrize("tokens", [40, 100, 400])
def test_no_text_is_said_slower_than_by_plain_decoding(costs, tokens):
    """A text after any texts reaches 0.95 of the speed of plain decoding at least."""
    order = torch.randint(len(KINDS), (60,), generator=torch.Generator().manual_seed(tokens)).tolist()
    for start in (warmed, lambda costs: Widths(ladder(max(costs)), 16)):
        widths, took = start(costs), {}
        for number, kind in enumerate(order):
            name = list(KINDS)[kind]
            # One width's unknown cost may exceed the stake once, in a new engine's first texts.
            took.setdefault(name, []).append(simulate(widths, costs, KINDS[name], tokens, number)[0])
        first = 0 if start is warmed else 3
        assert max(max(each[first:]) for each in took.values()) < 1 / 0.95
        # A bet that is never made gains nothing.
        assert sum(took["maths"]) / len(took["maths"]) < (0.75 if tokens > 40 else 0.85)


def test_rounds_that_are_often_slower_than_usual_are_paid_in_full(monkeypatch):
    """A draft of few tokens would gain if every round took the time of the shortest."""
    costs = {1: 1.0, 4: 1.25, 8: 1.7}

    def took() -> float:
        widths, pace, luck = warmed(costs), Pace(), torch.Generator().manual_seed(0)
        said = spent = 0.0
        while said < 64:
            width = widths.next(pace).width
            slow = 1.8 if width > 1 and torch.rand(1, generator=luck) < 0.4 else 1.0
            count = 1 + int(width > 1 and torch.rand(1, generator=luck) < 0.4)
            widths.note(Rounds(width, 1), slow * costs[width], [[count]], pace)
            said, spent = said + count, spent + slow * costs[width]
        return spent / said

    assert took() < 1 / 0.95
    monkeypatch.setattr(Widths, "_paid", lambda self, width, rounds, _: rounds * self._cost(width))
    assert took() > 1 / 0.95


@pytest.mark.parametrize("slow, every", [(50.0, 40), (1.5, 2)], ids=["hiccups", "a busy machine"])
def test_what_slows_all_rounds_stops_no_draft(slow, every):
    costs, took, number = {1: 1.0, 4: 1.25, 8: 1.6}, 0.0, 0
    widths, pace, luck = warmed(costs), Pace(), torch.Generator().manual_seed(0)
    while number < 400:
        turn, number = widths.next(pace), number + 1
        count = min(1 + int(torch.poisson(torch.tensor(1.5), generator=luck)), turn.width)
        now = slow if number % every == 0 else 1.0
        widths.note(turn._replace(rounds=1), now * costs[turn.width], [[count]], pace)
        took += count - costs[turn.width]
    assert took > 200


def test_a_slow_moment_of_plain_rounds_makes_no_draft_cheap():
    widths = warmed({1: 1.0, 4: 1.25, 8: 1.7})
    for slow in (1.0, *[1.3] * 6):
        widths.note(Rounds(1, 16), 16 * slow, [[1] * 16], Pace())
    assert widths._cost(4) == 1.25


def test_a_bet_without_an_allowance_loses_more(monkeypatch):
    monkeypatch.setattr("torch_dflash.engine.width.ALLOWANCE", UNLIMITED)
    widths = warmed(COSTS["steep"])
    worst = [simulate(widths, COSTS["steep"], KINDS[kind], 100)[0] for kind in ("maths", "chat") * 10]
    assert max(worst) > 1 / 0.93


@pytest.mark.parametrize(
    ("gain", "costs", "best"),
    [
        (1.0, {1: 1.0, 4: 1.1, 16: 1.3}, 16),
        (1.0, {1: 1.0, 4: 1.5, 16: 4.5}, 4),
        (0.1, {1: 1.0, 4: 1.8, 16: 4.5}, 1),
    ],
)
def test_of_trees_too_the_width_is_chosen_that_gains_most(gain, costs, best):
    """A round of w rows accepts ``gain`` drafts a doubling; one round of each width shows all."""
    widths, turns = TreeWidths(tuple(costs), 16, 16), []
    pace = Pace()
    for _ in range(60):
        turn = widths.next(pace)
        counts = [1 + round(gain * math.log2(turn.width))] * turn.rounds
        widths.note(turn, sum(costs[turn.width] for _ in counts), [counts], pace)
        turns.append(turn.width)
    assert max(set(turns[20:]), key=turns[20:].count) == best
    assert widths.expected(1) == 1 and widths.expected(1 << 40) <= 16


def test_plain_decoding_loses_little_to_looking():
    costs = {1: 1.0, 2: 1.9, 4: 1.9, 8: 1.9}
    took, turns = simulate(warmed(costs), costs, 0.05, 3000)
    assert took < 1 / 0.99
    looks = [turn for turn in turns if turn.width > 1]
    assert all(turn.rounds <= LOOK for turn in looks)
    assert len(looks) == pytest.approx((ALLOWANCE + SHARE * 3000) / 0.9, abs=2)


@pytest.mark.parametrize("where", ["eager", "xla"])
def test_a_warm_engine_knows_what_rounds_cost_and_nothing_of_texts(where):
    target, drafter = small_pair("llama", agree=6.0)
    engine = td.compile(target, drafter, runtime=where, max_length=96, batch_size=2, verify_width="auto")
    assert not engine._widths.measured
    engine.warmup()
    assert engine._widths.measured
    assert engine._widths.expected(6) == Widths(ladder(6), 16).expected(6)
    _, stats = run(engine, PROMPTS, max_new_tokens=40, do_sample=False)
    assert stats.compilations == 0


def test_a_text_that_becomes_easy_is_noticed():
    costs = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6}
    widths, pace = warmed(costs), Pace()
    for easy, best in ((False, 1), (True, 8)):
        for _ in range(40):
            turn = widths.next(pace)
            count = turn.width if easy else 1
            widths.note(turn, turn.rounds * costs[turn.width], [[count] * turn.rounds], pace)
        assert widths.settled().width == best


@pytest.mark.parametrize("wrong", [1, 8])
def test_a_cost_that_was_measured_wrongly_is_measured_again(wrong, monkeypatch):
    """After a pause during warm-up width 8 seems dear, or plain decoding seems slow."""

    def begin() -> Widths:
        widths = warmed(costs)
        widths._seconds[wrong] = deque([8 * costs[wrong]] * TRIALS, KEPT)
        return widths

    costs = {1: 1.0, 4: 1.4, 8: 1.6}
    chance, best = (0.9, 8) if wrong == 8 else (0.05, 1)
    widths = begin()
    for number in range(30):  # short texts, too short to try a width
        _, turns = simulate(widths, costs, chance, 100, number)
    assert share(turns, best) > 0.7
    monkeypatch.setattr("torch_dflash.engine.width.STALE", UNLIMITED)
    monkeypatch.setattr("torch_dflash.engine.width.STALE_PLAIN", UNLIMITED)
    widths = begin()
    for number in range(30):
        _, turns = simulate(widths, costs, chance, 100, number)
    assert share(turns, best) < 0.3


@pytest.mark.parametrize("rounds", [16, 128, 1024])
def test_showing_a_cost_again_leaves_every_width_measured(rounds):
    costs = {1: 1.0, 4: 3.0, 8: 4.0}  # no width pays
    widths, pace, turns = Widths(ladder(8), rounds), Pace(since_look=-int(UNLIMITED)), []
    for width in costs:
        widths._seconds[width].extend([costs[width]] * TRIALS)
    for _ in range(300):
        turn = widths.next(pace)
        hiccup = 9.0 if turn.width == 8 and len(turns) % 2 else 1.0
        widths.note(turn, turn.rounds * costs[turn.width] * hiccup, [[1] * turn.rounds], pace)
        turns.append(turn)
        assert widths.measured and widths._cost(8) == 4.0
    assert share(turns, 1) > 0.99 and turns.count(Rounds(1, rounds)) > 90


def test_a_chunk_that_compiled_or_read_a_prompt_is_not_timed():
    widths, pace = Widths((1, 2), 16), Pace()
    for _ in range(TRIALS):
        widths.note(Rounds(1, 2), 0.2, [[1, 1]], pace)
    widths.note(Rounds(2, 4), None, [[1, 2, 1, 1]], pace)
    assert not widths.measured and widths.expected(2) == pytest.approx(1.4, abs=0.1)
    for _ in range(TRIALS):
        widths.note(Rounds(2, 4), 0.4, [[], []], pace)  # no round ran
    assert not widths.measured and pace.tokens == 2 * TRIALS + 5


def test_a_fixed_width_stays():
    target, _ = make_pair("llama")
    engine = td.compile(target, Scripted(1, 96, 6), runtime="eager", max_length=64, verify_width=3).warmup()
    assert engine._widths.widths == (3,) and engine._widths.next(Pace()) == Rounds(3, 1)
    ladders = {1: (1,), 2: (1, 2), 4: (1, 4), 6: (1, 4, 6), 16: (1, 4, 8, 16)}
    assert {widest: ladder(widest) for widest in ladders} == ladders


def test_other_widths_are_refused_by_name():
    pair = make_pair("llama")
    for width in ("wide", 0, -1, True):
        with pytest.raises(ValueError, match=r"verify_width=.*at least 1, or \"auto\""):
            td.compile(*pair, max_length=64, verify_width=width)
    with pytest.raises(ValueError, match=r"verify_width=2\.5: must be an integer"):
        check_width(2.5)
