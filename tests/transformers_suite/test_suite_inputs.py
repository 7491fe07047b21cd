"""Prompts are ids by several names, or none; embeddings and foreign masks are refused."""

import copy

import pytest
import torch
from support.doors import DOORS, FOLDER, OF_ROWS

import torch_dflash as td

GREEDY = {"max_new_tokens": 8, "do_sample": False, "pad_token_id": 96}
CALLS = ["generate", "custom_generate", "folder"]


def ways(pair):
    """The two forms of ``custom_generate``, as options of ``target.generate``."""
    repository = {"custom_generate": FOLDER, "trust_remote_code": True, "runtime": "eager"}
    return [
        {"custom_generate": td.dflash(pair[1], runtime="eager")},
        repository | {"assistant_model": pair[1]},
    ]


def test_names_of_the_ids(pair, row):
    """After `GenerationIntegrationTests.test_generate_input_ids_as_kwarg`."""
    ids, target = row["input_ids"], pair[0]
    expected = target.generate(ids, **GREEDY)
    for way in ways(pair):
        assert torch.equal(target.generate(ids, **GREEDY, **way), expected)
        assert torch.equal(target.generate(inputs=ids, **GREEDY, **way), expected)
        assert torch.equal(target.generate(input_ids=ids, **GREEDY, **way), expected)
    with pytest.raises(ValueError, match="input"):
        target.generate(ids, input_ids=ids, **GREEDY, **ways(pair)[0])


def test_no_ids(pair):
    """After `GenerationTesterMixin.test_generate_without_input_ids`: from the first id, or refused."""
    target = copy.deepcopy(pair[0])
    target.generation_config.bos_token_id = 5
    expected = target.generate(**GREEDY)
    assert torch.equal(target.generate(**GREEDY, **ways(pair)[0]), expected)
    with pytest.raises(TypeError, match="input_ids=NoneType.*LongTensor"):
        td.generate(*pair, **GREEDY, runtime="eager")


@pytest.mark.parametrize("door", CALLS)
@pytest.mark.parametrize("more", [{}, {"cache_implementation": "static"}], ids=["dynamic", "static"])
def test_embeddings(pair, row, door, more):
    """After `GenerationTesterMixin.test_generate_from_inputs_embeds`,
    `GenerationTesterMixin.test_generate_from_inputs_embeds_with_static_cache` and
    `GenerationTesterMixin.test_generate_continue_from_inputs_embeds`: refused, with and without ids."""
    embeds = pair[0].get_input_embeddings()(row["input_ids"])
    for inputs in (row, {}):
        with pytest.raises((ValueError, TypeError), match="inputs_embeds|input_ids=NoneType|input_ids"):
            DOORS[door](pair, inputs, **GREEDY, **more, inputs_embeds=embeds)


@pytest.mark.parametrize("door", CALLS)
def test_positions(pair, batch, door):
    """After `GenerationTesterMixin.test_generate_with_and_without_position_ids`: the mask's own are taken."""
    mask = batch["attention_mask"]
    places = (mask.cumsum(-1) - 1).masked_fill(mask == 0, 1)
    expected = pair[0].generate(**batch, **GREEDY, position_ids=places)
    assert torch.equal(expected, pair[0].generate(**batch, **GREEDY))
    assert torch.equal(DOORS[door](pair, batch, **GREEDY, position_ids=places), expected)
    with pytest.raises(ValueError, match="position_ids"):
        DOORS[door](pair, batch, **GREEDY, position_ids=places + 3)


@pytest.mark.parametrize("door", OF_ROWS)
def test_a_mask_of_four_dimensions(pair, row, door):
    """After `ModelTesterMixin.test_custom_4d_attention_mask`: ``generate`` takes none, here either."""
    width = row["input_ids"].shape[1]
    mask = torch.ones(1, 1, width, width, dtype=torch.long).tril()
    with pytest.raises(ValueError, match="attention_mask"):
        DOORS[door](pair, {"input_ids": row["input_ids"], "attention_mask": mask}, **GREEDY)


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("name", ["foo", "max_tokens", "encoder_outputs_"])
def test_misspelt_names(pair, row, door, name):
    """After `GenerationIntegrationTests.test_validate_generation_inputs`: the error has an unknown name."""
    with pytest.raises((TypeError, ValueError), match=name):
        DOORS[door](pair, row, **GREEDY, **{name: 3})


@pytest.mark.parametrize("door", CALLS)
def test_what_a_forward_knows(pair, row, door):
    """After `GenerationIntegrationTests.test_model_kwarg_assisted_decoding_decoder_only`: kinds of tokens."""
    expected = pair[0].generate(**row, **GREEDY)
    for name, value in (("labels", None), ("output_attentions", False)):
        assert torch.equal(DOORS[door](pair, row, **GREEDY, **{name: value}), expected)
