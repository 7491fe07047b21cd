"""The length of a text follows all length options, and the default."""

import copy

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from transformers import GenerationConfig

GREEDY = {"do_sample": False, "pad_token_id": 0}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default")
@pytest.mark.parametrize("door", OF_ROWS)
def test_no_length_at_all(pair, batch, door):
    """After `GenerationIntegrationTests.test_default_max_length_warning`: transformers' own 20 new tokens."""
    assert torch.equal(DOORS[door](pair, batch, **GREEDY), pair[0].generate(**batch, **GREEDY))


@pytest.mark.parametrize("door", OF_ROWS)
def test_lengths_of_a_model(pair, batch, door):
    """After `GenerationIntegrationTests.test_max_new_tokens_decoder_only`: a call's goes before a model's."""
    target, width = copy.deepcopy(pair[0]), batch["input_ids"].shape[1]
    for own in ({"max_length": width + 6}, {"max_new_tokens": 5}):
        target.generation_config = GenerationConfig(**own, **GREEDY)
        for asked in ({}, {"max_new_tokens": 3}):
            expected = target.generate(**batch, **asked)
            assert torch.equal(DOORS[door]((target, pair[1]), batch, **asked), expected)
            assert expected.shape[1] == width + asked.get(
                "max_new_tokens", 5 if "max_new_tokens" in own else 6
            )


@pytest.mark.parametrize("door", OF_ROWS)
def test_whole_lengths(pair, batch, door):
    """After `GenerationIntegrationTests.test_max_new_tokens_decoder_only`: prompt and text together."""
    width = batch["input_ids"].shape[1]
    for columns in (width + 1, width + 9):
        expected = pair[0].generate(**batch, **GREEDY, max_length=columns)
        assert torch.equal(DOORS[door](pair, batch, **GREEDY, max_length=columns), expected)
    with pytest.raises(ValueError, match="max_length|max_new_tokens|length"):
        DOORS[door](pair, batch, **GREEDY, max_length=width)


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("least", [{"min_new_tokens": 6}, {"min_length": 27}], ids=["new", "whole"])
def test_least_lengths(pair, batch, door, least):
    """After `GenerationIntegrationTests.test_min_length_if_input_embeds`, from ids."""
    width, asked = batch["input_ids"].shape[1], GREEDY | {"max_new_tokens": 10}
    text = pair[0].generate(**batch, **asked)
    stop = int(text[0, width + 1])
    expected = pair[0].generate(**batch, **asked, **least, eos_token_id=stop)
    assert torch.equal(DOORS[door](pair, batch, **asked, **least, eos_token_id=stop), expected)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("new", [0, -1])
def test_no_new_token(pair, row, door, new):
    """After `GenerationConfigTest.test_validate`: refused, as by transformers."""
    with pytest.raises(ValueError, match="max_new_tokens"):
        DOORS[door](pair, row, **GREEDY, max_new_tokens=new)
