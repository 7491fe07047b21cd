"""Generation configs: a model's, a call's, one from a file; none is written into."""

import copy

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from transformers import GenerationConfig

BASIC = {"do_sample": False, "pad_token_id": 0}


def tokens(door, pair, batch, **asked):
    return DOORS[door](pair, batch, **asked)


@pytest.mark.parametrize("door", ["generate", "custom_generate", "folder"])
def test_a_config_of_the_call(pair, batch, door):
    """After `GenerationConfigTest.test_update`: options of a call go before its config, which stays."""
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.0, **BASIC)
    before = config.to_dict()
    for more in ({}, {"max_new_tokens": 4}, {"no_repeat_ngram_size": 2}):
        expected = pair[0].generate(**batch, generation_config=config, **more)
        assert torch.equal(tokens(door, pair, batch, generation_config=config, **more), expected)
    assert config.to_dict() == before


@pytest.mark.parametrize("door", OF_ROWS)
def test_a_config_of_the_model(pair, batch, door):
    """After `GenerationConfigTest.test_initialize_new_kwargs`: what a model brings needs no option."""
    target = copy.deepcopy(pair[0])
    target.generation_config = GenerationConfig(max_new_tokens=9, no_repeat_ngram_size=2, **BASIC)
    before, expected = target.generation_config.to_dict(), target.generate(**batch)
    assert torch.equal(tokens(door, (target, pair[1]), batch), expected)
    assert target.generation_config.to_dict() == before
    assert not torch.equal(expected, pair[0].generate(**batch, max_new_tokens=9, **BASIC))


@pytest.mark.parametrize("door", ["generate", "custom_generate", "folder"])
def test_a_config_of_a_file(pair, batch, door, tmp_path):
    """After `GenerationConfigTest.test_save_load_config`."""
    GenerationConfig(max_new_tokens=7, bad_words_ids=[[10], [33]], **BASIC).save_pretrained(tmp_path)
    config = GenerationConfig.from_pretrained(tmp_path)
    expected = pair[0].generate(**batch, generation_config=config)
    assert torch.equal(tokens(door, pair, batch, generation_config=config), expected)


@pytest.mark.parametrize("door", OF_ROWS)
def test_values_that_are_none(pair, batch, door):
    """After `GenerationConfigTest.test_validate`: refused before anything runs, as by transformers."""
    asked = {"max_new_tokens": 4, "pad_token_id": 0, "do_sample": True}
    for wrong in ({"temperature": -1.0}, {"top_p": -0.5}, {"top_k": -3}):
        (name,) = wrong
        with pytest.raises(ValueError, match=name):
            DOORS[door](pair, batch, **asked, **wrong)


@pytest.mark.parametrize("door", OF_ROWS)
def test_kinds_of_numbers(pair, batch, door):
    """After `GenerationConfigTest.test_kwarg_init`: a number may be a whole one, and ids a tensor."""
    expected = pair[0].generate(**batch, **BASIC, max_new_tokens=6, eos_token_id=[10, 33])
    ids = torch.tensor([10, 33])
    assert torch.equal(tokens(door, pair, batch, **BASIC, max_new_tokens=6, eos_token_id=ids), expected)
