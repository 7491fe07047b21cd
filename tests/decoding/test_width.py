"""`verify_width="auto"`: rounds of every width share a state, and what is chosen gains most."""

from __future__ import annotations

import pytest
import torch
from support.scripted import Scripted, own_text, run
from support.states import look
from support.tiny import make_pair

import torch_dflash as td
from torch_dflash.decode import draft
from torch_dflash.engine.width import PROBE, PROBE_EVERY, TRIAL, Widths, ladder
from torch_dflash.proposers.dflash.proposer import DFlashProposer
from torch_dflash.runtime import Turn

PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [3, 1, 4]]
WINDOW = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 12}
MIXED = (1, 6, 1, 1, 2, 4, 1, 1, 1, 6, 4, 1)


class Mixed(Widths):
    """Rounds of these widths, one a chunk, over and over."""

    def next(self) -> Turn:
        self.used = [*getattr(self, "used", []), MIXED[len(getattr(self, "used", [])) % len(MIXED)]]
        return Turn(self.used[-1], 1)


def mixed(pair, where: str, **options):
    engine = td.compile(*pair, runtime=where, max_length=96, verify_width="auto", **options)
    engine._widths = Mixed(engine._widths.widths, 1)
    return engine


@pytest.mark.parametrize(
    ("where", "kind", "cache"),
    [("eager", kind, cache) for kind in ("dflash", "ring", "ngram") for cache in ("static", "paged")]
    + [("xla", "dflash", "static"), ("xla", "ring", "paged")],
)
def test_rounds_of_all_widths_say_the_targets_own_text(where, kind, cache):
    target, drafter = make_pair("llama", agree=6.0, **(WINDOW if kind == "ring" else {}))
    engine = mixed(
        (target, td.NGramProposer(6) if kind == "ngram" else drafter), where, batch_size=2, cache=cache
    )
    texts, stats = run(engine, PROMPTS, max_new_tokens=60, do_sample=False)
    assert texts == [own_text(target, prompt, 60) for prompt in PROMPTS]
    assert set(engine._widths.used) == {1, 2, 4, 6}
    sampled = {"max_new_tokens": 40, "do_sample": True, "seed": 3}
    whole = td.compile(target, drafter, runtime=where, max_length=96, batch_size=2)
    assert run(engine, PROMPTS, **sampled)[0] == run(whole, PROMPTS, **sampled)[0]


@pytest.mark.parametrize("kind", ["full", "ring"])
def test_rounds_of_any_width_leave_the_drafter_as_a_prompt_does(kind, monkeypatch):
    target, drafter = make_pair("llama", agree=6.0, **(WINDOW if kind == "ring" else {}))

    def drafts_differ() -> bool:
        """Whether mixed rounds ever leave another draft than the same text, read as a prompt."""
        engine = mixed((target, drafter), "eager")
        params = engine.tensors()
        state = engine.start(torch.tensor(PROMPTS[:1]), max_new_tokens=60, do_sample=False, eos_token_id=None)
        differ = []
        for width in MIXED * 2:
            state = engine.runtime.advance(params, state, Turn(width, 1))
            said = state.tokens[:, : int(state.length[0]) + 1]
            fresh = engine.start(said[:, :-1].long(), max_new_tokens=8, do_sample=False, eos_token_id=None)
            assert torch.equal(fresh.anchor, state.anchor)
            both = [
                engine.pair.run(lambda pair, at: draft(pair, at)[0].tokens, params, at)
                for at in (state, fresh)
            ]
            differ.append(not torch.equal(*both))
        return any(differ)

    assert not drafts_differ()
    monkeypatch.setattr(DFlashProposer, "skip", lambda self, pstate, *_: pstate)
    with pytest.raises(AssertionError):  # a buffer that is not emptied: rows are lost
        assert not drafts_differ()


def test_switching_compiles_nothing():
    target, drafter = make_pair("llama", agree=6.0)
    engine = mixed((target, drafter), "xla").warmup()
    for new in (20, 50):
        _, stats = run(engine, PROMPTS[:1], max_new_tokens=new, do_sample=False)
        assert stats.compilations == 0
    assert set(engine._widths.used) == {1, 2, 4, 6}


def test_a_state_moves_between_fixed_and_chosen_widths(tmp_path):
    target, drafter = make_pair("llama", agree=6.0)
    options = {"runtime": "eager", "max_length": 96, "rounds_per_chunk": 2}
    chosen = td.compile(target, drafter, verify_width="auto", **options)
    fixed = td.compile(target, drafter, **options)
    ids, asked = torch.tensor(PROMPTS[:1]), {"max_new_tokens": 40, "do_sample": False, "eos_token_id": None}
    state = chosen.runtime.advance(chosen.tensors(), chosen.start(ids, **asked), Turn(1, 3))
    td.save_state(state, tmp_path / "state", chosen)
    state = td.load_state(tmp_path / "state", fixed)
    while not look(fixed.runtime, state).done.all():
        state = fixed.advance(state)
    seen = look(fixed.runtime, state)
    assert seen.tokens[0, len(PROMPTS[0]) : seen.length[0] + 1].tolist() == own_text(target, PROMPTS[0], 40)


def simulate(costs: dict[int, float], chances: list[float], rounds: int) -> tuple[Widths, list[Turn]]:
    """What is chosen where a round of each width takes ``costs`` and position k is accepted with a chance."""
    generator = torch.Generator().manual_seed(0)
    widths, turns = Widths(ladder(max(costs)), 16), []
    while sum(turn.rounds for turn in turns) < rounds:
        turn = widths.next()
        counts = []
        for _ in range(turn.rounds):
            luck = torch.rand(len(chances), generator=generator).tolist()
            kept = [draw < chance for draw, chance in zip(luck, chances, strict=True)][: turn.width - 1]
            counts.append((*kept, False).index(False) + 1)
        widths.note(turn, turn.rounds * costs[turn.width], [counts])
        turns.append(turn)
    return widths, turns


def share(turns: list[Turn], width: int) -> float:
    """Which part of the rounds, after all widths were tried, had ``width``."""
    turns = turns[4:]
    return sum(t.rounds for t in turns if t.width == width) / sum(t.rounds for t in turns)


@pytest.mark.parametrize(
    "costs, chance, best",
    [
        ({1: 1, 2: 1.05, 4: 1.1, 8: 1.2}, 0.9, 8),  # flat: all of it pays
        ({1: 1, 2: 1.1, 4: 1.3, 8: 2.2}, 0.6, 4),
        ({1: 1, 2: 1.5, 4: 1.8, 8: 2.5}, 0.3, 1),  # nothing pays
    ],
)
def test_the_width_that_gains_most_is_chosen(costs, chance, best):
    widths, turns = simulate(costs, [chance] * 7, 2000)
    assert [turn.width for turn in turns[:4]] == [8, 4, 2, 1] and turns[0].rounds == TRIAL
    assert share(turns, best) > 0.9
    assert widths.expected(8) == pytest.approx(sum(chance**k for k in range(8)), rel=0.35)


def test_plain_decoding_loses_little_to_looking():
    costs = {1: 1.0, 2: 1.9, 4: 1.9, 8: 1.9}
    _, turns = simulate(costs, [0.05] * 7, 3000)
    seconds = sum(turn.rounds * costs[turn.width] for turn in turns)
    assert seconds < 3000 / 0.95
    probes = [turn for turn in turns[4:] if turn.width == 8]
    assert probes and all(turn.rounds == PROBE for turn in probes)
    assert len(probes) == pytest.approx(3000 / (PROBE_EVERY + 16), abs=10)


def test_a_text_that_becomes_easy_is_noticed():
    costs = {1: 1.0, 2: 1.1, 4: 1.3, 8: 1.6}
    widths, _ = simulate(costs, [0.0] * 7, 300)
    assert widths.settled().width == 1
    for _ in range(400):
        turn = widths.next()
        widths.note(turn, turn.rounds * costs[turn.width], [[turn.width] * turn.rounds])
    assert widths.settled().width == 8


def test_a_chunk_that_compiled_or_read_a_prompt_is_not_timed():
    widths = Widths((1, 2), 16)
    widths.note(Turn(2, 4), None, [[1, 2, 1, 1]])
    assert widths.next().width == 2 and widths.expected(2) == pytest.approx(1.4, abs=0.1)
    widths.note(Turn(2, 4), 0.4, [[], []])  # no round ran
    assert widths.next().width == 2


def test_a_fixed_width_stays():
    target, _ = make_pair("llama")
    engine = td.compile(target, Scripted(1, 96, 6), runtime="eager", max_length=64, verify_width=3)
    assert engine._widths.widths == (3,) and engine._widths.next() == Turn(3, 1)
    assert ladder(1) == (1,) and ladder(6) == (1, 2, 4, 6) and ladder(16) == (1, 2, 4, 8, 16)


@pytest.mark.parametrize("width", ["wide", 0, -1, True, 2.5])
def test_other_widths_are_refused_by_name(width):
    with pytest.raises(ValueError, match=r"verify_width=.*at least 1, or \"auto\""):
        td.compile(*make_pair("llama"), max_length=64, verify_width=width)
