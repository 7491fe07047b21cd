"""Greedy decoding: texts, and outputs as dictionaries."""

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from transformers.generation.utils import GenerateDecoderOnlyOutput

from torch_dflash.cache.view import CACHE

GREEDY = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}
TELLING = [*OF_ROWS, "native"]


@pytest.mark.parametrize("door", DOORS)
def test_a_row(pair, row, door):
    """After `GenerationTesterMixin.test_greedy_generate`."""
    expected = pair[0].generate(**row, **GREEDY)
    assert torch.equal(DOORS[door](pair, row, **GREEDY), expected)


@pytest.mark.parametrize("door", OF_ROWS)
def test_a_batch(pair, batch, door):
    """After `GenerationTesterMixin.test_greedy_generate`."""
    expected = pair[0].generate(**batch, **GREEDY)
    assert torch.equal(DOORS[door](pair, batch, **GREEDY), expected)


@pytest.mark.parametrize("door", TELLING)
def test_dictionaries(pair, row, door):
    """After `GenerationTesterMixin.test_greedy_generate_dict_outputs`."""
    told = GREEDY | {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
    theirs, ours = pair[0].generate(**row, **told), DOORS[door](pair, row, **told)
    assert isinstance(ours, GenerateDecoderOnlyOutput)
    assert torch.equal(ours.sequences, theirs.sequences)
    for name in ("scores", "logits"):
        found, wanted = getattr(ours, name), getattr(theirs, name)
        assert len(found) == GREEDY["max_new_tokens"]
        torch.testing.assert_close(torch.stack(found), torch.stack(wanted), rtol=1e-4, atol=1e-4)
    assert ours.attentions is None and ours.hidden_states is None


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("use_cache", [True, False])
def test_dictionaries_whatever_use_cache_says(pair, batch, door, use_cache):
    """After `GenerationTesterMixin.test_greedy_generate_dict_outputs_use_cache`."""
    told = GREEDY | {"return_dict_in_generate": True, "use_cache": use_cache}
    theirs, ours = pair[0].generate(**batch, **told), DOORS[door](pair, batch, **told)
    assert torch.equal(ours.sequences, theirs.sequences)
    assert getattr(ours, CACHE) is None and ours.scores is None  # our cache is not transformers'


@pytest.mark.heavy
@pytest.mark.parametrize("door", OF_ROWS)
def test_compiled_programs(pair, batch, door):
    """After `GenerationTesterMixin.test_generate_compilation_all_outputs`."""
    expected = pair[0].generate(**batch, **GREEDY)
    for _ in range(2):
        out = DOORS[door](pair, batch, **GREEDY, runtime="xla", return_dict_in_generate=True)
        assert torch.equal(out.sequences, expected)
    assert door == "compiled" or out.stats.compilations == 0
