"""Make this process only compile. Call it before importing the rest of the bridge."""

from __future__ import annotations

import os

import jax


def compile_only() -> None:
    """Use no accelerator of this host: another process may be using it. Too late once JAX has started.

    Importing the lowerings starts JAX's default platform, so this must come first.
    """
    # libtpu asks for its host's name and type even then; without them it prints apparent failures.
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5p-8")
    jax.config.update("jax_platforms", "cpu")
