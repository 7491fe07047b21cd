"""``custom_generate`` in each of its forms: a callable, a folder, a repository of its own."""

import inspect
import shutil

import pytest
import torch
from support.doors import FOLDER
from transformers import AutoModelForCausalLM

import torch_dflash as td

GREEDY = {"max_new_tokens": 10, "do_sample": False, "pad_token_id": 0}


def test_a_callable(pair, batch):
    """After `GenerationIntegrationTests.test_custom_generate_callable`: ours, and a user's around it."""
    seen, block = [], td.dflash(pair[1], runtime="eager")

    def around(model, input_ids, logits_processor, stopping_criteria, generation_config, word=None, **more):
        seen.append(word)
        return block(model, input_ids, logits_processor, stopping_criteria, generation_config, **more)

    expected = pair[0].generate(**batch, **GREEDY)
    assert torch.equal(pair[0].generate(**batch, **GREEDY, custom_generate=block), expected)
    assert torch.equal(pair[0].generate(**batch, **GREEDY, custom_generate=around, word="yes"), expected)
    assert seen == ["yes"]


def test_arguments_of_its_own(pair, batch):
    """After `GenerationIntegrationTests.test_custom_generate_callable`: new names arrive, typos do not."""
    block = td.dflash(pair[1], runtime="eager")
    named = set(inspect.signature(block).parameters)
    assert {"seed", "output_logprobs", "top_logprobs", "grammar", "response_format"} <= named
    asked = GREEDY | {"do_sample": True, "temperature": 3.0, "seed": 5}
    plain = td.generate(pair[0], None, **batch, **asked, runtime="eager")
    assert torch.equal(pair[0].generate(**batch, **asked, custom_generate=block), plain)
    with pytest.raises(ValueError, match="sed"):
        pair[0].generate(**batch, **GREEDY, sed=5, custom_generate=block)


def test_a_folder(pair, batch):
    """After `GenerationIntegrationTests.test_custom_generate_from_argument_in_generate`."""
    given = {"custom_generate": FOLDER, "trust_remote_code": True, "runtime": "eager"}
    expected = pair[0].generate(**batch, **GREEDY)
    for drafter in (pair[1], None, td.NGramProposer(4)):
        assert torch.equal(pair[0].generate(**batch, **GREEDY, **given, assistant_model=drafter), expected)


def test_a_repository_with_its_own(pair, batch, tmp_path):
    """After `GenerationIntegrationTests.test_custom_generate_from_model_repo_with_custom_generate_code`."""
    pair[0].save_pretrained(tmp_path)
    shutil.copytree(f"{FOLDER}/custom_generate", tmp_path / "custom_generate")
    how = {"attn_implementation": pair[0].config._attn_implementation}
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=True, **how)
    expected = pair[0].generate(**batch, **GREEDY)
    out = loaded.generate(
        **batch, **GREEDY, assistant_model=pair[1], runtime="eager", return_dict_in_generate=True
    )
    assert torch.equal(out.sequences, expected)
    assert out.stats.rounds < GREEDY["max_new_tokens"]  # something was drafted
    plain = AutoModelForCausalLM.from_pretrained(tmp_path, trust_remote_code=False, **how)
    assert torch.equal(plain.generate(**batch, **GREEDY), expected)


def test_code_that_nobody_trusts(pair, batch, tmp_path):
    """After `GenerationIntegrationTests.test_custom_generate_requires_trust_remote_code`."""
    with pytest.raises((OSError, ValueError)):
        pair[0].generate(**batch, **GREEDY, custom_generate=str(tmp_path), trust_remote_code=True)
    with pytest.raises((OSError, ValueError), match="trust_remote_code|custom_generate"):
        pair[0].generate(**batch, **GREEDY, custom_generate="nobody/nothing", trust_remote_code=False)
