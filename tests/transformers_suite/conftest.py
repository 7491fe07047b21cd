"""Pairs of several families (`make test` has one), and prompts in transformers' form."""

import pytest
import torch
from support.doors import pair_of
from support.tiny import ragged_prompts
from support.versions import needs_native

FAMILIES = ["qwen3"]
# Windows, sinks and experts, soft caps, latent attention.
MORE = ["qwen2", "gpt_oss", "gemma2", "deepseek_v3"]
FAMILIES += [pytest.param(name, marks=pytest.mark.heavy) for name in MORE]


@pytest.fixture(scope="session", params=FAMILIES)
def pair(request):
    """A target and a drafter, which no test may change."""
    return pair_of(request.param)


@pytest.fixture(scope="session")
def batch():
    ids, mask = ragged_prompts(2)
    return {"input_ids": ids, "attention_mask": mask}


@pytest.fixture(scope="session")
def row():
    ids = ragged_prompts(1)[0]
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pytest_collection_modifyitems(items):
    """transformers' own loop is a door where a version has one that is right: tests run it in threads too."""
    for item in items:
        if hasattr(item, "callspec") and item.callspec.params.get("door") == "native":
            item.add_marker(needs_native)
