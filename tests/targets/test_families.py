"""Attention-only decoders beyond the four families run by the same route, traced, not special-cased."""

import pytest
import torch
from support.families import MORE
from support.tiny import BASE, make_drafter, randomise

import torch_dflash as td


@pytest.mark.parametrize("family", MORE)
def test_greedy_text_equals_transformers(family):
    cls, config, extra = MORE[family]
    torch.manual_seed(0)
    target = randomise(cls(config(**(BASE | extra))), 0)
    ids = torch.randint(0, 96, (1, 11), generator=torch.Generator().manual_seed(1))
    wanted = target.generate(ids, max_new_tokens=24, do_sample=False)
    for drafter in (make_drafter(target), td.NGramProposer(5)):
        got = td.generate(target, drafter, ids, max_new_tokens=24, do_sample=False, runtime="eager")
        assert torch.equal(got, wanted)
