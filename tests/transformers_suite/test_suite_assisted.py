"""Assisted decoding and prompt lookup: as the target alone, whatever is drafted."""

import copy

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from support.tiny import make_drafter

import torch_dflash as td

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
LOOKUP = ["generate", "custom_generate", "folder", "compiled"]


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("drafter", ["half right", "random"])
def test_the_text_is_the_greedy_one(pair, row, door, drafter):
    """After `GenerationTesterMixin.test_assisted_decoding_matches_greedy_search`, of both kinds of drafts."""
    target = pair[0]
    given = pair[1] if drafter == "half right" else make_drafter(target, seed=5)
    expected = target.generate(**row, **GREEDY)
    assert torch.equal(DOORS[door]((target, given), row, **GREEDY), expected)


@pytest.mark.parametrize("door", LOOKUP)
@pytest.mark.parametrize("width", [2, 4])
def test_prompt_lookup(pair, batch, door, width):
    """After `GenerationTesterMixin.test_prompt_lookup_decoding_matches_greedy_search`."""
    expected = pair[0].generate(**batch, **GREEDY)
    assert torch.equal(DOORS[door]((pair[0], td.NGramProposer(width)), batch, **GREEDY), expected)


@pytest.mark.parametrize("door", LOOKUP)
def test_prompt_lookup_ends_at_a_stop_id(pair, row, door):
    """After `GenerationTesterMixin.test_prompt_lookup_decoding_stops_at_eos`: anywhere in a block."""
    target, width = pair[0], row["input_ids"].shape[1]
    text = target.generate(**row, **GREEDY)
    ids = torch.cat([text[:, width:], text[:, :width]], dim=1)  # what is drafted has been in the prompt
    inputs = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
    for stop in text[0, width:].unique().tolist():
        expected = target.generate(**inputs, **GREEDY, eos_token_id=stop)
        found = DOORS[door]((target, td.NGramProposer(4)), inputs, **GREEDY, eos_token_id=stop)
        assert torch.equal(found, expected)


@pytest.mark.parametrize("door", OF_ROWS)
def test_samples_do_not_depend_on_the_drafter(pair, batch, door):
    """After `GenerationTesterMixin.test_assisted_decoding_sample`, for a seed instead of for shapes alone."""
    asked = {"max_new_tokens": 10, "do_sample": True, "temperature": 2.0, "seed": 4, "pad_token_id": 0}
    plain = td.generate(pair[0], None, **batch, **asked, runtime="eager")
    for drafter in (pair[1], td.NGramProposer(3)):
        assert torch.equal(DOORS[door]((pair[0], drafter), batch, **asked), plain)


@pytest.mark.parametrize("door", DOORS)
def test_lengths_of_assisted_texts(pair, row, door):
    """After `GenerationIntegrationTests.test_generated_length_assisted_generation`: any number of tokens."""
    width = row["input_ids"].shape[1]
    expected = pair[0].generate(**row, **GREEDY)
    for new in (1, 2, 5, 7):
        found = DOORS[door](pair, row, **GREEDY | {"max_new_tokens": new})
        assert torch.equal(found, expected[:, : width + new])


@pytest.mark.parametrize("door", ["generate", "custom_generate", "folder"])
def test_schedules_of_drafts_change_no_text(pair, batch, door):
    """After `GenerationIntegrationTests.test_assisted_decoding_num_assistant_tokens_heuristic_schedule`."""
    expected = pair[0].generate(**batch, **GREEDY)
    schedule = {"num_assistant_tokens": 3, "num_assistant_tokens_schedule": "heuristic"}
    assert torch.equal(DOORS[door](pair, batch, **GREEDY, **schedule), expected)


@pytest.mark.parametrize("door", DOORS)
def test_models_and_their_configs_stay(pair, row, door):
    """After `GenerationIntegrationTests.test_assisted_decoding_num_assistant_tokens_transient_schedule`."""
    target, drafter = pair
    before = copy.deepcopy([target.generation_config.to_dict(), target.config.to_dict()])
    drafts = copy.deepcopy(drafter.config.to_dict())
    first = DOORS[door](pair, row, **GREEDY)
    assert [target.generation_config.to_dict(), target.config.to_dict()] == before
    assert drafter.config.to_dict() == drafts
    assert torch.equal(DOORS[door](pair, row, **GREEDY), first)
