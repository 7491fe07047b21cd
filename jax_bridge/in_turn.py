"""Steps that run one after another, each as soon as its program is there; meanwhile the next are traced."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from jax_bridge.lower import Programs

AHEAD = 3
"""Programs of a runtime that may be compiled at once: each takes memory of the host meanwhile."""


def run_in_turn(
    programs: Programs, steps: Sequence[tuple[str, Callable[[Any], tuple]]], state: Any, bar: Any
) -> Any:
    """What the last of ``steps`` makes of ``state``. While some are compiled or run, the next is traced.

    A program's first run takes long, too: XLA's CPU runtime prepares its products then, one by one.

    Args:
        programs: that compiles them.
        steps: what each is called in the bar, and ``state -> (name, step, args, donate)`` of `Programs.get`,
            where ``args`` hold the state and the step makes the next one. Called twice, to trace and to run.
        state: consumed.
        bar: moves on with each step that runs.
    """
    waiting: deque[tuple[str, Callable[[Any], tuple], Future]] = deque()

    def run_next() -> Any:
        called, step, _ = waiting.popleft()
        bar.set_description(called)  # maybe for long: it may still be compiled
        name, function, args, donate = step(state)
        following = programs.get(name, function, args, donate)(*args)
        bar.update()
        return following

    for called, step in steps:
        bar.set_description(called)
        waiting.append((called, step, programs.start(*step(state))))
        while waiting and (waiting[0][2].done() or len(waiting) >= AHEAD):
            state = run_next()
    while waiting:
        state = run_next()
    return state
