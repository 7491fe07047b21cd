"""Experts of a wrapper's language model are swapped, and a latent target of any rope has a tiny twin."""

import pytest
import torch
from support.taps import build

import torch_dflash as td
from torch_dflash.targets.experts import EXPERTS
from torch_dflash.targets.skeleton import build_skeleton, configs_of
from torch_dflash.verify.twin import build_twin


@pytest.mark.parametrize("case", ["kimi_k25", "mistral3:mistral4"])
def test_experts_are_swapped_where_the_class_of_the_wrapper_has_none(case):
    target = build(case)
    assert not type(target)._can_set_experts_implementation()
    assert {config._experts_implementation for config in configs_of(build_skeleton(target))} == {EXPERTS}


def test_a_wrapper_without_experts_keeps_its_configs():
    found = {config._experts_implementation for config in configs_of(build_skeleton(build("llava")))}
    assert EXPERTS not in found


@pytest.mark.parametrize("case", ["mistral4", "deepseek_v3"])
def test_a_twin_of_latent_attention_turns_the_rope_of_its_keys(case):
    """The rope of Mistral-4 turns half of ``head_dim``, that of DeepSeek-V3 all of it."""
    twin = build_twin(build(case))
    with torch.no_grad():
        logits = twin(torch.arange(8)[None]).logits
    assert logits.shape[:2] == (1, 8)


@pytest.mark.parametrize("case", ["kimi_k25", "mistral4"])
def test_a_latent_target_with_experts_decodes_to_its_own_text(case):
    target = build(case)
    ids, mask = torch.randint(3, 80, (2, 9)), torch.ones(2, 9, dtype=torch.long)
    mask[1, :4] = 0
    options = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    theirs = target.generate(ids, attention_mask=mask, **options)
    ours = td.generate(target, td.NGramProposer(4), ids, mask, runtime="eager", **options)
    assert torch.equal(ours, theirs)
