"""A warm-up runs each step as soon as its program is there, in order, and traces the next ones meanwhile."""

from concurrent.futures import Future
from itertools import accumulate

import pytest
from support.tiny import small_pair

import torch_dflash as td
from jax_bridge.programs.lower import AHEAD, run_pipelined

NAMES = list("abcdef")


class Scripted:  # programs that are there at once, or when they are waited for; every event is noted
    def __init__(self, at_once: str = "", broken: str = ""):
        self.noted: list[str] = []
        self._at_once, self._broken = at_once, broken

    def start(self, name: str, step, args: tuple, donate: tuple[int, ...]) -> Future:
        self.noted.append(f"trace {name}")
        future: Future = Future()
        if name in self._at_once:
            future.set_result(step)
        return future

    def get(self, name: str, step, args: tuple, donate: tuple[int, ...]):
        self.noted.append(f"run {name}")
        if name in self._broken:
            raise ValueError(name)
        return step


class Bar:  # notes its messages among the events of the programs
    def __init__(self, noted: list[str]):
        self.noted, self.moved = noted, 0

    def set_description(self, said: str) -> None:
        self.noted.append(said)

    def update(self) -> None:
        self.moved += 1


def all_steps():
    def step(name: str):
        return lambda state: (name, lambda state: state + name, (state,), (0,))

    return [(f"step {name}", step(name)) for name in NAMES]


def run(programs: Scripted) -> str:
    return run_pipelined(programs, all_steps(), "", Bar([]))  # pyright: ignore


def test_each_runs_once_in_order_on_what_the_one_before_made():
    for at_once in ("", "abcdef", "bd"):
        programs = Scripted(at_once)
        assert run(programs) == "abcdef"
        assert [note for note in programs.noted if note[:3] == "run"] == [f"run {name}" for name in NAMES]


def test_one_that_is_there_runs_before_more_is_traced():
    programs = Scripted("abcdef")
    run(programs)
    assert programs.noted == [f"{what} {name}" for name in NAMES for what in ("trace", "run")]


def test_no_more_are_compiled_at_once_than_it_says():
    programs = Scripted()
    run(programs)
    ahead = list(accumulate(1 if note.startswith("trace") else -1 for note in programs.noted))
    assert max(ahead) == AHEAD


def test_one_that_fails_is_told():
    with pytest.raises(ValueError, match="c"):
        run(Scripted(broken="c"))


def test_the_bar_says_what_is_waited_for():
    for at_once in ("", "abcdef"):
        programs = Scripted(at_once)
        bar = Bar(programs.noted)
        run_pipelined(programs, all_steps(), "", bar)  # pyright: ignore
        assert bar.moved == len(NAMES)
        said = [
            note for note in zip(programs.noted, programs.noted[1:], strict=False) if note[0][:4] == "step"
        ]
        assert all(before[-1] == after[-1] for before, after in said)
        assert len(said) == 2 * len(NAMES)


def test_a_warm_up_runs_a_round_of_every_width(monkeypatch):
    """A round of resting rows would not do: XLA prepares products when a program first computes them."""
    engine = td.compile(*small_pair("llama"), runtime="xla", max_length=48, verify_width="auto")
    seen, read = [], engine.runtime.read
    monkeypatch.setattr(
        engine.runtime, "read", lambda state, *rest: seen.append(state.rounds) or read(state, *rest)
    )
    monkeypatch.setattr(engine, "_measure_widths", lambda params: None)
    engine.warmup(progress=False)
    (rounds,), widths = seen, engine._widths.widths
    compiled = {key[0] for key in engine.runtime._programs._compiled}
    assert rounds.tolist() == [len(widths)] and compiled >= {f"rounds of {width}" for width in widths}
