"""A text ends at stop ids, strings, times, and the user's criteria."""

import copy

import pytest
import torch
from support.doors import DOORS, FOLDER, OF_ROWS, through_pipeline
from support.tokenizers import letters
from transformers import MaxLengthCriteria, StoppingCriteriaList, StopStringCriteria

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
CALLS = ["generate", "custom_generate", "folder"]


@pytest.fixture(scope="module")
def text(pair, batch):
    return pair[0].generate(**batch, **GREEDY)


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("many", [False, True], ids=["one", "list"])
def test_stop_ids(pair, batch, text, door, many):
    """After `GenerationIntegrationTests.test_eos_token_id_int_and_list_greedy_search`, at every token."""
    width = batch["input_ids"].shape[1]
    for stop in text[:, width:].unique().tolist()[::2]:
        eos = [stop, 96] if many else stop
        expected = pair[0].generate(**batch, **GREEDY, eos_token_id=eos)
        assert torch.equal(DOORS[door](pair, batch, **GREEDY, eos_token_id=eos), expected)


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize("many", [False, True], ids=["one", "list"])
def test_stop_ids_of_samples(pair, row, door, many):
    """After `GenerationIntegrationTests.test_eos_token_id_int_and_list_top_k_top_sampling`, where k is 1."""
    width = row["input_ids"].shape[1]
    stop = int(pair[0].generate(**row, **GREEDY)[0, width + 4])
    if door == "spec_generate":
        eos = [stop, 96] if many else [stop]  # z-lab's takes a list alone
    else:
        eos = [stop, 96] if many else stop
    asked = {"max_new_tokens": 12, "do_sample": True, "temperature": 2.0, "top_k": 1, "pad_token_id": 0}
    expected = pair[0].generate(**row, **asked, eos_token_id=eos)
    assert torch.equal(DOORS[door](pair, row, **asked, eos_token_id=eos), expected)


@pytest.mark.parametrize("door", OF_ROWS)
def test_special_ids_of_the_model(pair, batch, text, door):
    """After `GenerationIntegrationTests.test_special_tokens_fall_back_to_model_default`."""
    target, width = copy.deepcopy(pair[0]), batch["input_ids"].shape[1]
    target.generation_config.update(eos_token_id=int(text[0, width + 3]), pad_token_id=91)
    asked = {"max_new_tokens": 12, "do_sample": False}
    for given in ({}, {"eos_token_id": int(text[1, width + 5])}, {"pad_token_id": 90}):
        expected = target.generate(**batch, **asked, **given)
        assert torch.equal(DOORS[door]((target, pair[1]), batch, **asked, **given), expected)


class EndsOnEvenLength:
    """A user's criterion: any row ends at its 8th column from 24 on."""

    def __call__(self, input_ids, scores, **kwargs):
        return torch.full((len(input_ids),), input_ids.shape[1] >= 24 and input_ids.shape[1] % 8 == 0)


@pytest.mark.parametrize("door", CALLS)
def test_criteria_of_the_users(pair, batch, door):
    """After `GenerationIntegrationTests.test_custom_stopping_criteria`."""
    criteria = StoppingCriteriaList([EndsOnEvenLength()])
    for asked in (GREEDY, GREEDY | {"max_new_tokens": 30}):
        expected = pair[0].generate(**batch, **asked, stopping_criteria=criteria)
        assert torch.equal(DOORS[door](pair, batch, **asked, stopping_criteria=criteria), expected)


@pytest.mark.parametrize("door", CALLS)
def test_a_criterion_beside_its_option(pair, batch, door):
    """After `GenerationIntegrationTests.test_custom_stopping_criteria_overload_error`: the shorter counts."""
    width = batch["input_ids"].shape[1]
    expected = pair[0].generate(**batch, **GREEDY | {"max_new_tokens": 5})
    criteria = StoppingCriteriaList([MaxLengthCriteria(width + 5)])
    assert torch.equal(DOORS[door](pair, batch, **GREEDY, stopping_criteria=criteria), expected)


@pytest.mark.parametrize("door", ["generate", "folder"])
@pytest.mark.parametrize("place", range(0, 12, 3))
def test_stop_strings(pair, batch, text, door, place):
    """After `StoppingCriteriaTestCase.test_stop_string_criteria` and
    `GenerationIntegrationTests.test_stop_sequence_stopping_criteria`."""
    (words, names), width = letters(), batch["input_ids"].shape[1]
    strings = ["".join(names[token] for token in text[0, width + place : width + place + 2])]
    asked = GREEDY | {"stop_strings": strings, "tokenizer": words, "eos_token_id": 96}
    expected = pair[0].generate(**batch, **asked)
    assert expected.shape[1] <= text.shape[1]
    assert torch.equal(DOORS[door](pair, batch, **asked), expected)


def test_stop_strings_as_a_criterion(pair, batch, text):
    """After `StoppingCriteriaTestCase.test_stop_string_criteria`: where transformers drops the tokenizer."""
    (words, names), width = letters(), batch["input_ids"].shape[1]
    for place in (0, 4, 7):
        string = names[text[0, width + place]]
        criteria = StoppingCriteriaList([StopStringCriteria(words, [string])])
        asked = GREEDY | {"stopping_criteria": criteria, "eos_token_id": 96}
        expected = pair[0].generate(**batch, **asked)
        assert torch.equal(DOORS["custom_generate"](pair, batch, **asked), expected)
    with pytest.raises(ValueError, match="tokenizer"):
        DOORS["custom_generate"](pair, batch, **GREEDY, stop_strings=["b"], tokenizer=words)


def test_the_sequence_of_a_pipeline(pair, row):
    """After `TextGenerationPipelineTests.test_stop_sequence_stopping_criteria`: by the folder, or refused."""
    words, names = letters()
    width = row["input_ids"].shape[1]
    expected = pair[0].generate(**row, **GREEDY)
    stop = expected[0, width + 5]
    first = expected[0, width:].tolist().index(stop)
    try:
        found = through_pipeline(pair, row, **GREEDY, stop_sequence=names[stop])
    except ValueError as error:  # the newer versions of transformers drop the tokenizer on the way
        assert "tokenizer" in str(error)
    else:
        assert torch.equal(found, expected[:, : width + first + 1])
    by_folder = {"custom_generate": FOLDER, "trust_remote_code": True, "assistant_model": pair[1]}
    asked = GREEDY | by_folder | {"runtime": "eager", "stop_sequence": names[stop]}
    assert torch.equal(through_pipeline(pair, row, **asked), expected[:, : width + first + 1])


@pytest.mark.parametrize("door", OF_ROWS)
def test_times(pair, batch, text, door):
    """After `StoppingCriteriaTestCase.test_max_time_criteria`: a long one says nothing, a short one cuts."""
    assert torch.equal(DOORS[door](pair, batch, **GREEDY, max_time=900.0), text)
    cut = DOORS[door](
        pair, batch, **GREEDY | {"max_new_tokens": 400 if door != "compiled" else 40}, max_time=1e-6
    )
    width = batch["input_ids"].shape[1]
    assert width < cut.shape[1] <= width + 8
    assert torch.equal(cut, text[:, : cut.shape[1]])
