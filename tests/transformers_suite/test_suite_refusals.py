"""Options of transformers' tests that blocks cannot honour are refused by name, through each door."""

import pytest
import torch
from support.doors import DOORS, OF_ROWS
from transformers import T5Config, T5ForConditionalGeneration, WatermarkingConfig

import torch_dflash as td

GREEDY = {"max_new_tokens": 6, "do_sample": False, "pad_token_id": 0}
REFUSED = {"num_beams": 2, "penalty_alpha": 0.6, "guidance_scale": 1.5, "prompt_lookup_num_tokens": 3}
REFUSED |= {"output_attentions": True, "output_hidden_states": True}
REFUSED |= {"watermarking_config": WatermarkingConfig(bias=2.0), "token_healing": True}
REFUSED |= {"remove_invalid_values": True}


@pytest.mark.parametrize("door", OF_ROWS)
@pytest.mark.parametrize("name", REFUSED)
def test_options(pair, batch, door, name):
    """After the tests of transformers in the second table of docs/hf_tests.md."""
    with pytest.raises((ValueError, TypeError, ImportError), match=f"{name}|beam|contrastive|okenizer"):
        DOORS[door](pair, batch, **GREEDY, **{name: REFUSED[name]})


def test_an_encoder_and_a_decoder():
    """After the tests of transformers in the second table of docs/hf_tests.md."""
    config = T5Config(
        vocab_size=97, d_model=16, d_kv=4, d_ff=16, num_layers=1, num_heads=2, decoder_start_token_id=0
    )
    target = T5ForConditionalGeneration(config).eval()
    ids = torch.tensor([[3, 4, 5]])
    for call in (
        lambda: td.generate(target, td.NGramProposer(3), ids, **GREEDY, runtime="eager"),
        lambda: td.compile(target, td.NGramProposer(3), runtime="eager", max_length=64),
        lambda: target.generate(
            ids, **GREEDY, custom_generate=td.dflash(td.NGramProposer(3), runtime="eager")
        ),
    ):
        with pytest.raises((ValueError, TypeError), match="T5ForConditionalGeneration|encoder"):
            call()
