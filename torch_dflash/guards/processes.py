"""Checks of forked processes and copies: a process that started JAX cannot be forked or copied."""

from __future__ import annotations

import os
import sys
from typing import Any, NoReturn

from torch_dflash.runtime_kinds import RUNTIMES


def check_process(runtime: Any) -> None:
    """Raise ``RuntimeError`` where ``runtime`` needs JAX, and this process was forked after JAX had started.

    A fork copies none of JAX's threads, so the first program would wait for ever.
    """
    if _forked and runtime in RUNTIMES and RUNTIMES[runtime].needs_jax:
        raise RuntimeError(
            f"runtime={runtime!r}: this process was forked after JAX had started, and a fork copies none of "
            "JAX's threads: a program would wait for ever. Start the process by spawn "
            '(multiprocessing.get_context("spawn"), or "forkserver"); or pass runtime=\'eager\', after '
            "torch.set_num_threads(1), for torch's own threads are not copied either."
        )


class OfOneProcess:
    """Base of classes that cannot be copied or pickled: they hold programs, locks and device memory."""

    def __reduce_ex__(self, protocol: Any) -> NoReturn:
        kind = type(self).__name__
        raise TypeError(
            f"{kind} can be neither copied nor pickled, for it holds programs and locks of this process; "
            "compile in the worker: hand it the models, or their names, and call torch_dflash.compile there."
        )


def _jax_has_started() -> bool:
    # Without JAX's own lock, which another thread of the parent may have held when it forked.
    return bool(getattr(sys.modules.get("jax._src.xla_bridge"), "_backends", None))


def _note_fork() -> None:
    global _forked
    _forked = _forked or _jax_has_started()


_forked = False
if hasattr(os, "register_at_fork"):  # not on Windows, where nothing forks
    os.register_at_fork(after_in_child=_note_fork)
