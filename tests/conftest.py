import os
import tempfile

import pytest
import torch
from support.heavy import HEAVY
from support.trained import overfit, world

__all__ = ["overfit", "world"]  # fixtures of the session

# Threads that wait for a busy core make small tensors many times slower than one thread is.
torch.set_num_threads(1)


def pytest_configure(config):
    """Programs are kept in a folder of this run, in its subprocesses too, never in the user's cache."""
    config.kept_programs = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = config.kept_programs.name


def pytest_unconfigure(config):
    config.kept_programs.cleanup()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if item.nodeid.removeprefix("tests/") in HEAVY:
            item.add_marker(pytest.mark.heavy)
