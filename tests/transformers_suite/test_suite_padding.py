"""Left padding: a row has the same text in a batch and alone."""

import copy

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from torch.nn.functional import pad

GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("columns", [1, 9])
def test_a_padded_row(pair, row, door, columns):
    """After `GenerationTesterMixin.test_left_padding_compatibility`: logits and text."""
    width = row["input_ids"].shape[1]
    padded = {name: pad(value, (columns, 0)) for name, value in row.items()}
    told = GREEDY | {"return_dict_in_generate": True, "output_logits": True}
    bare, found = DOORS[door](pair, row, **told), DOORS[door](pair, padded, **told)
    assert torch.equal(found.sequences[:, :columns], torch.zeros(1, columns, dtype=torch.long))
    assert torch.equal(found.sequences[:, columns:], bare.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(bare.logits), rtol=1e-4, atol=1e-4)
    assert torch.equal(bare.sequences, pair[0].generate(**row, **GREEDY))
    assert found.sequences.shape[1] == columns + width + GREEDY["max_new_tokens"]


@pytest.mark.parametrize("door", OF_ROWS)
def test_rows_of_a_batch(pair, batch, door):
    """After `GenerationTesterMixin.test_left_padding_compatibility`: each row of a ragged batch alone."""
    out = DOORS[door](pair, batch, **GREEDY)
    width = batch["input_ids"].shape[1]
    for index, real in enumerate(batch["attention_mask"].bool()):
        alone = batch["input_ids"][index, real][None]
        inputs = {"input_ids": alone, "attention_mask": torch.ones_like(alone)}
        assert torch.equal(out[index, width:], DOORS[door](pair, inputs, **GREEDY)[0, alone.shape[1] :])


@pytest.mark.parametrize("door", OF_ROWS)
def test_a_mask_that_nobody_gave(pair, batch, door):
    """After `GenerationTesterMixin.test_left_padding_compatibility`: pad ids are padding."""
    target = copy.deepcopy(pair[0])
    ids = batch["input_ids"].masked_fill(batch["attention_mask"] == 0, 96)
    target.generation_config.pad_token_id = 96
    asked = {"max_new_tokens": 8, "do_sample": False}
    expected = target.generate(ids, attention_mask=batch["attention_mask"], **asked)
    assert torch.equal(DOORS[door]((target, pair[1]), {"input_ids": ids}, **asked), expected)
    assert torch.equal(target.generate(ids, **asked), expected)
