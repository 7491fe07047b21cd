import gc
import os
import sys
import tempfile

import pytest
import torch
from huggingface_hub import constants
from hypothesis import settings
from support.heavy import heavy_cases
from support.trained import overfit, world

__all__ = ["overfit", "world"]  # fixtures of the session

collect_ignore = ["in_vllm"]  # runs in vLLM's environment (`make test-vllm`)

# Threads that wait for a busy core make small tensors many times slower than one thread is.
torch.set_num_threads(1)

# The same examples in each run, so that a failure means a change; `make test-heavy` draws others.
settings.register_profile("fixed", derandomize=True, deadline=None)
settings.register_profile("drawn", deadline=None)
settings.load_profile("fixed")


def pytest_configure(config):
    """Programs are kept in a folder of this run, in its subprocesses too, never in the user's cache.

    Nothing is fetched from the hub: transformers looks there for adapters even of a cached model, and waits
    20 s where there is no network.
    """
    os.environ["HF_HUB_OFFLINE"], constants.HF_HUB_OFFLINE = "1", True
    gc.disable()  # until all files are imported: no import leaves garbage
    config.kept_programs = tempfile.TemporaryDirectory()
    os.environ["JAX_COMPILATION_CACHE_DIR"] = config.kept_programs.name


def pytest_unconfigure(config):
    config.kept_programs.cleanup()
    if "triton" in sys.modules:  # an uncollected object prints a page of leaks
        gc.unfreeze()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(session, config, items):
    found = {item.nodeid.removeprefix("tests/"): item for item in items}
    heavy, unmatched = heavy_cases(set(found))
    for case in heavy:
        found[case].add_marker(pytest.mark.heavy)
    files = {case.partition("::")[0] for case in found}
    whole = not config.getoption("lf", False) and not any("::" in argument for argument in config.args)
    whole = whole and not session.testsfailed  # a file with an error has no cases, and pytest says why
    if config.args == config.getini("testpaths"):
        files |= {pattern.partition("::")[0] for pattern in unmatched}  # patterns of many files, too
    lost = [pattern for pattern in unmatched if whole and pattern.partition("::")[0] in files]
    if lost:
        raise pytest.UsageError(f"tests/heavy.txt names cases that are not there: {lost}")


def pytest_collection_finish():
    """Freezes all imported objects: each garbage collection would look at a million of them."""
    gc.collect()
    gc.freeze()
    gc.enable()
