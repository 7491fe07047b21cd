"""Compiled programs: kept on disk for the next process, and counted."""

from __future__ import annotations

import os
import threading
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

import jax

from torch_dflash.storage.folders import cache_root

FOLDER = "xla"


@lru_cache(maxsize=1)  # one attempt and one warning a process
def keep_programs() -> None:
    """Make JAX keep programs under the user's cache directory, unless the user has chosen another.

    JAX's own thresholds stay: it keeps programs that took a second or more to compile. The setting is the
    process's, so its other programs are kept too. ``jax_compilation_cache_dir``, its environment variable and
    ``jax_enable_compilation_cache=False`` are respected. A folder that is not writable gives one warning.
    """
    config: Any = jax.config
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    folder: Any = FOLDER
    try:
        folder = cache_root() / FOLDER
        folder.mkdir(parents=True, exist_ok=True)
        usable = os.access(folder, os.W_OK | os.X_OK)
        reason = "not writable"
    except (OSError, RuntimeError) as error:  # RuntimeError: this user has no home
        usable, reason = False, getattr(error, "strerror", None) or str(error)
    if usable:
        jax.config.update("jax_compilation_cache_dir", str(folder))
    else:
        warnings.warn(
            f"compiled programs are not kept: {folder} is {reason}. Make it writable, or set "
            "jax_compilation_cache_dir to a folder that is.",
            stacklevel=2,
        )


_COMPILED = "/jax/core/compile/backend_compile_duration"
_counter = threading.local()


def _count(event: str, duration_secs: float, **_: Any) -> None:
    if event == _COMPILED:
        count(1)


jax.monitoring.register_event_duration_secs_listener(_count)


def compilations() -> int:
    """XLA programs compiled so far by or for this thread."""
    return getattr(_counter, "value", 0)


def count(programs: int) -> None:
    """Add programs that were compiled by or for this thread."""
    _counter.value = compilations() + programs


@contextmanager
def uncounted() -> Iterator[None]:
    """While open, compilations do not count: they measure the machine."""
    before = compilations()
    try:
        yield
    finally:
        _counter.value = before
