"""A pair whose drafts are often right, and two ragged prompts as transformers takes them."""

import pytest
from support import tiny


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair(agree=2.5)


@pytest.fixture(scope="module")
def batch():
    ids, mask = tiny.ragged_prompts(2)
    return {"input_ids": ids, "attention_mask": mask}
