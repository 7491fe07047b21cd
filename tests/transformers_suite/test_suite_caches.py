"""Caches: of any kind the text is one; a filled one is refused, for the loop keeps its own."""

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from transformers import DynamicCache, StaticCache

import torch_dflash as td
from torch_dflash.cache.view import CACHE

GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}
CALLS = ["generate", "custom_generate", "folder"]


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("kind", ["static", "dynamic"])
def test_kinds_of_caches(pair, batch, door, kind):
    """After `GenerationTesterMixin.test_generate_with_static_cache`."""
    expected = pair[0].generate(**batch, **GREEDY, cache_implementation=kind)
    assert torch.equal(DOORS[door](pair, batch, **GREEDY, cache_implementation=kind), expected)


@pytest.mark.parametrize("door", CALLS)
@pytest.mark.parametrize("kind", ["dynamic", "of the config", "static"])
def test_an_empty_cache_stays_empty(pair, batch, door, kind):
    """After `GenerationTesterMixin.test_past_key_values_format`: what is handed over is left as it was."""
    target, length = pair[0], batch["input_ids"].shape[1] + 10
    cache = {
        "dynamic": lambda: DynamicCache(),
        "of the config": lambda: DynamicCache(config=target.config),
        "static": lambda: StaticCache(config=target.config, max_cache_len=length),
    }[kind]()
    expected = target.generate(**batch, **GREEDY)
    assert torch.equal(DOORS[door](pair, batch, **GREEDY, **{CACHE: cache}), expected)
    assert int(cache.get_seq_length()) == 0


@pytest.mark.parametrize("door", CALLS)
def test_a_cache_that_rounds(pair, batch, door):
    """After `GenerationTesterMixin.test_generate_with_quant_cache`: it is refused."""
    with pytest.raises((ValueError, ImportError), match="[Cc]ache"):  # some of transformers' need a library
        DOORS[door](pair, batch, **GREEDY, cache_implementation="quantized")


@pytest.mark.parametrize("door", OF_ROWS)
def test_a_text_that_goes_on(pair, batch, door):
    """After `GenerationTesterMixin.test_generate_continue_from_past_key_values`: from its ids, in two."""
    expected = pair[0].generate(**batch, **GREEDY)
    first = DOORS[door](pair, batch, **GREEDY | {"max_new_tokens": 4})
    mask = torch.cat([batch["attention_mask"], torch.ones(2, 4, dtype=torch.long)], dim=1)
    more = {"input_ids": first, "attention_mask": mask}
    assert torch.equal(DOORS[door](pair, more, **GREEDY | {"max_new_tokens": 6}), expected)


@pytest.mark.parametrize("door", CALLS)
def test_a_filled_cache(pair, row, door):
    """After `GenerationTesterMixin.test_generate_continue_from_past_key_values`: its cache is refused."""
    out = pair[0].generate(**row, **GREEDY, return_dict_in_generate=True)
    mask = torch.ones_like(out.sequences)
    inputs = {"input_ids": out.sequences, "attention_mask": mask}
    with pytest.raises(ValueError, match=r"past_key_values\) holds \d+ tokens.*whole input_ids"):
        DOORS[door](pair, inputs, **GREEDY, **{CACHE: getattr(out, CACHE)})


def test_a_state_that_goes_on(pair, row):
    """After `GenerationTesterMixin.test_generate_continue_from_past_key_values`: our states continue."""
    expected = pair[0].generate(**row, **GREEDY)
    engine = td.compile(*pair, runtime="eager", max_length=64)
    state = engine.start(**row, **GREEDY)
    while not bool(state.done.all()):
        state = engine.advance(state)
    width = expected.shape[1]
    assert state.tokens[0, :width].tolist() == expected[0].tolist()


@pytest.mark.parametrize("door", CALLS)
def test_how_many_logits_are_kept(pair, batch, door):
    """After `GenerationTesterMixin.test_generate_methods_with_logits_to_keep`."""
    expected = pair[0].generate(**batch, **GREEDY)
    assert torch.equal(DOORS[door](pair, batch, **GREEDY, logits_to_keep=0), expected)
