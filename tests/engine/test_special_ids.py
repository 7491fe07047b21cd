"""Stop ids and padding ids of every kind, one for all rows or one list per row."""

import copy
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from support import tiny
from support.refusals import refuses

import torch_dflash as td
from torch_dflash.checks import INT32_MAX, positions_of
from torch_dflash.requests.read import read_request

NEW = 12


@pytest.fixture(scope="module")
def pair():
    return tiny.make_pair(agree=2.5)


@pytest.fixture(scope="module")
def text(pair):
    ids, mask = tiny.ragged_prompts(2)
    return pair[0].generate(ids, attention_mask=mask, max_new_tokens=NEW, do_sample=False, pad_token_id=0)


@pytest.mark.parametrize("kind", [torch.tensor, np.array, tuple], ids=["tensor", "array", "tuple"])
def test_stop_ids_in_an_array(pair, text, kind):
    target, drafter = copy.deepcopy(pair[0]), pair[1]
    ids, mask = tiny.ragged_prompts(2)
    stops = [int(text[0, ids.shape[1] + 3]), int(text[1, ids.shape[1] + 6])]
    call = {"attention_mask": mask, "max_new_tokens": NEW, "pad_token_id": 0}
    expected = target.generate(ids, **call, do_sample=False, eos_token_id=stops)
    assert not torch.equal(expected, text)
    ours = td.generate(target, drafter, ids, **call, eos_token_id=kind(stops), runtime="eager")
    assert torch.equal(ours, expected)
    if kind is not torch.tensor:
        return
    block = td.dflash(drafter, runtime="eager")
    through = target.generate(ids, **call, do_sample=False, eos_token_id=kind(stops), custom_generate=block)
    assert torch.equal(through, expected)
    target.generation_config.eos_token_id = kind(stops)
    assert torch.equal(td.generate(target, drafter, ids, **call, runtime="eager"), expected)


def read(pair, ids, **options):
    return read_request(pair[0], ids, None, {"max_new_tokens": 3} | options)


def test_a_pad_that_ends_a_rows_text_is_no_padding_there(pair):
    ids = torch.tensor([[3, 4, 5], [9, 4, 5], [5, 4, 9]])
    rows = read(pair, ids, pad_token_id=5, eos_token_id=[[5], [9], [9]]).rows
    assert [row.prompt.tolist() for row in rows] == [[3, 4, 5], [9, 4], [4, 9]]
    rows = read(pair, ids, pad_token_id=5, eos_token_id=[5, 9]).rows
    assert [row.length for row in rows] == [3, 3, 3]
    rows = read(pair, ids, pad_token_id=5, eos_token_id=torch.tensor([6, 7])).rows
    assert [row.length for row in rows] == [2, 2, 2]


def test_rows_of_their_own_stop_ids_need_no_pad(pair):
    ids = torch.tensor([[3, 4, 5], [9, 4, 5]])
    for stops in ([[5], [9]], [[5], []], [[], [5]], [[5], 9], torch.tensor([[5], [9]]), np.array([[5], [9]])):
        request = read(pair, ids, eos_token_id=stops)
        rows = request.rows
        assert [row.length for row in rows] == [3, 3]
        assert request.pad_token_id == 5


def test_padding_ids_of_any_integer_kind(pair):
    for pad in (7, np.int64(7), torch.tensor(7), np.array(7), INT32_MAX):
        assert read(pair, torch.tensor([[3, 4, 5]]), pad_token_id=pad).pad_token_id == int(pad)


def test_the_seed_of_a_call_goes_before_the_bound_one(pair):
    target, drafter = pair
    ids = tiny.ragged_prompts(1)[0]
    asked = {"max_new_tokens": NEW, "do_sample": True, "temperature": 4.0}

    def draw(bound, **call):
        block = td.dflash(drafter, runtime="eager", seed=bound)
        return target.generate(ids, **asked, **call, custom_generate=block)

    assert torch.equal(draw(2, seed=1), draw(1)) and not torch.equal(draw(2, seed=1), draw(2))


def test_a_context_without_a_limit(pair):
    assert positions_of(pair[0].config) == 512
    for limits in ({"max_position_embeddings": -1}, {"max_position_embeddings": None}, {}):  # XLNet has -1
        config = SimpleNamespace(**limits)
        config.get_text_config = lambda config=config: config
        assert positions_of(config) == INT32_MAX


def test_stop_ids_that_are_none(pair):
    ids = torch.tensor([[3, 4, 5], [9, 4, 5]])
    with refuses(ValueError, "eos_token_id has 3 entries", "one per row"):
        read(pair, ids, eos_token_id=[[1], [2], [3]])
    with refuses(ValueError, "eos_token_id holds -1", "None or []"):
        read(pair, ids, eos_token_id=torch.tensor([-1]))
