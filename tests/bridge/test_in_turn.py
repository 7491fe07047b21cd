"""A warm-up runs each step as soon as its program is there, in order, and traces the next ones meanwhile."""

from __future__ import annotations

from concurrent.futures import Future

import pytest

from jax_bridge.in_turn import AHEAD, run_in_turn
from torch_dflash.progress import progress_bar

NAMES = list("abcdef")


class Scripted:
    """Programs that are there at once, or when they are waited for; what happens is noted."""

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


def all_steps():
    def step(name: str):
        return lambda state: (name, lambda state: state + name, (state,), (0,))

    return [(f"step {name}", step(name)) for name in NAMES]


def run(programs: Scripted) -> str:
    return run_in_turn(programs, all_steps(), "", progress_bar(False, total=len(NAMES)))  # pyright: ignore


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
    assert programs.noted[: AHEAD + 2] == [*(f"trace {name}" for name in NAMES[: AHEAD + 1]), "run a"]


def test_one_that_fails_is_told():
    with pytest.raises(ValueError, match="c"):
        run(Scripted(broken="c"))
