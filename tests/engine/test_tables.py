"""A logits rule and a kind of runtime decode after one new entry in a table and no other change."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch
from support.tiny import make_pair

import torch_dflash as td
from torch_dflash.processors.interface import Forgetful, column
from torch_dflash.processors.options import Option
from torch_dflash.requests import rules
from torch_dflash.requests.options import OF_A_CALL, GenerateOptions
from torch_dflash.requests.read import OWN
from torch_dflash.requests.refusals import HONOURED
from torch_dflash.runtime_kinds import RUNTIMES

IDS = torch.tensor([[5, 17, 80, 33], [2, 9, 41, 7]])
FIXED = {"max_new_tokens": 12, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}


@pytest.fixture(scope="module")
def pair():
    return make_pair()


@dataclass(frozen=True)
class FavourId(Forgetful):
    """``favoured_id``: this id is nearly certain."""

    reads_text = False
    options = (Option("favoured_id", -1, lambda v: v >= 0, "an id", per_row=True, ours=True),)

    def values(self, requested, starts):
        return column(requested, -1, torch.int32)

    def __call__(self, memory, text, logits):
        ids = torch.arange(logits.shape[-1], device=logits.device)
        return logits + 1e4 * (ids == memory[:, None, None])


@pytest.mark.parametrize("door", ["generate", "engine"])
def test_a_rule_is_one_entry(pair, monkeypatch, door):
    monkeypatch.setitem(rules.KINDS, "favoured_id", FavourId())
    plain = td.generate(*pair, IDS, runtime="eager", **FIXED)
    asked = FIXED | {"favoured_id": [None, 3]}
    if door == "generate":
        said = td.generate(*pair, IDS, runtime="eager", **asked)
    else:
        fixed = {"max_length": 64, "batch_size": 2, "processors": ("favoured_id",)}
        said = td.compile(*pair, runtime="eager", **fixed).generate(IDS, **asked)
    assert torch.equal(said[0], plain[0]) and said[1, 4:].tolist() == [3] * 12
    with pytest.raises(ValueError, match="favoured_id=-7: must be an id"):
        td.generate(*pair, IDS, runtime="eager", **FIXED | {"favoured_id": -7})


@pytest.mark.parametrize("drafter", ["pair's", "none"])
def test_a_kind_of_runtime_is_one_entry(pair, monkeypatch, drafter):
    target, drafter = pair[0], pair[1] if drafter == "pair's" else None
    monkeypatch.setitem(RUNTIMES, "other", replace(RUNTIMES["eager"], name="other", rounds_per_chunk=3))
    wanted = td.generate(target, drafter, IDS, runtime="eager", **FIXED)
    assert torch.equal(td.generate(target, drafter, IDS, runtime="other", **FIXED), wanted)
    engine = td.compile(target, drafter, runtime="other", max_length=64, batch_size=2)
    assert engine.plan.rounds_per_chunk == 3 and torch.equal(engine.generate(IDS, **FIXED), wanted)


def test_the_typed_options_are_those_that_a_call_takes():
    known = {*OWN, *rules.ours(), *OF_A_CALL, *HONOURED, "generation_config"} - {"return_dict_in_generate"}
    assert set(GenerateOptions.__annotations__) == known
