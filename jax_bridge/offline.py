"""Make a process one that only compiles. To be called before the rest of the bridge is imported."""

from __future__ import annotations

import os

import jax


def compile_only() -> None:
    """Stay off any accelerator here, which another process may be using; no effect on one already in use.

    Importing the lowerings starts JAX's default platform, so this must come first.
    """
    # libtpu asks for its host's name and type even then, and prints what looks like failures without.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    jax.config.update("jax_platforms", "cpu")
