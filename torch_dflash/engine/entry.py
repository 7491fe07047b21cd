"""Whether a call may begin here: asked at every door of an engine, before any work."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import closing
from typing import TypeVar

from torch_dflash.checks import check_autocast
from torch_dflash.decode import Pair
from torch_dflash.guards.processes import check_process
from torch_dflash.guards.reentry import inside

T = TypeVar("T")


def check_entry(pair: Pair, runtime: str) -> None:
    """Raise where ``pair`` cannot run.

    Raises:
        ValueError: torch casts what ``runtime`` does not.
        RuntimeError: this process was forked after JAX had started, or this thread is inside of a step of
            ``pair``.
    """
    check_process(runtime)
    pair.check_free()
    check_autocast(runtime)


def marked(pair: Pair, steps: Generator[T, None, None]) -> Generator[T, None, None]:
    """``steps``, each of which user code cannot call ``pair`` from; whoever reads them may."""
    with closing(steps):
        while True:
            pair.check_free()
            with inside(pair):
                step = next(steps, None)
            if step is None:
                return
            yield step
