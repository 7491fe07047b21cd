"""A class that nobody has tested is tried on a tiny random twin, and refused where the two part."""

from __future__ import annotations

import copy
import time

import pytest
import torch
import transformers as hf
from models import BASE, make_pair, make_target
from transformers.models.llama.modeling_llama import LlamaAttention, LlamaModel

import torch_dflash as td
from torch_dflash import twin, verify
from torch_dflash.tested import is_tested


class Shifted(hf.LlamaForCausalLM):
    """Mixes each token's embedding with the one before it: nothing that a layer hands over shows it."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        embeds = self.get_input_embeddings()(input_ids)
        before = torch.cat([torch.zeros_like(embeds[:, :1]), embeds[:, :-1]], dim=1)
        return super().forward(inputs_embeds=embeds + 0.5 * before, position_ids=position_ids, **kwargs)


class OnlyLate(hf.LlamaForCausalLM):
    """As `Shifted`, but the token counts that lies beyond the edge of a window."""

    def forward(self, input_ids=None, position_ids=None, **kwargs):
        embeds = self.get_input_embeddings()(input_ids)
        before = torch.roll(embeds, 7, dims=1)
        before[:, :7] = 0
        return super().forward(inputs_embeds=embeds + 0.5 * before, position_ids=position_ids, **kwargs)


class Steep(LlamaAttention):
    """Sharpens its attention with the length of what it is given."""

    def forward(self, hidden_states, *args, **kwargs):
        return super().forward(hidden_states * (1 + 0.1 * hidden_states.shape[1]), *args, **kwargs)


class Lengthy(hf.LlamaForCausalLM):
    def __init__(self, config):
        super().__init__(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = Steep(config, index)


class Harmless(hf.LlamaForCausalLM):
    """Another class, the same computation."""


class Unbuildable(hf.LlamaForCausalLM):
    """Wants the very width of the target it was written for."""

    def __init__(self, config):
        assert config.hidden_size == 4000, "only 4000 will do"
        super().__init__(config)


def build(cls, **overrides):
    torch.manual_seed(0)
    return cls(hf.LlamaConfig(**(BASE | overrides))).eval()


@pytest.mark.parametrize("cls", [Shifted, OnlyLate, Lengthy])
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_a_class_that_computes_something_else_is_refused_with_the_place(cls, cache):
    with pytest.raises(ValueError, match=rf"{cls.__name__}.*logits differ by .* at position \d+"):
        td.compile(build(cls), None, runtime="eager", max_length=64, cache=cache)


def test_it_is_refused_through_every_door():
    target, ids = build(Shifted), torch.tensor([[3, 4, 5]])
    with pytest.raises(ValueError, match="tiny random twin"):
        td.generate(target, None, ids, max_new_tokens=4, runtime="eager")
    with pytest.raises(ValueError, match="tiny random twin"):
        target.generate(ids, custom_generate=td.dflash(None, runtime="eager"), max_new_tokens=4)
    with pytest.raises(ValueError, match="block decoding is not what it computes"):
        td.check(target)


def test_verify_false_takes_the_user_at_their_word():
    target, ids = build(Shifted), torch.tensor([[3, 4, 5]])
    td.compile(target, None, runtime="eager", max_length=64, verify=False)
    td.generate(target, None, ids, max_new_tokens=4, runtime="eager", verify=False)
    block = td.dflash(None, runtime="eager", verify=False)
    target.generate(ids, custom_generate=block, max_new_tokens=4)


def test_another_class_of_the_same_computation_decodes():
    target, ids = build(Harmless), torch.tensor([[3, 4, 5]])
    wanted = target.generate(ids, max_new_tokens=8, do_sample=False)
    assert torch.equal(td.generate(target, None, ids, max_new_tokens=8, runtime="eager"), wanted)


def test_a_class_without_a_twin_is_refused_unless_told_otherwise():
    with torch.device("meta"):
        target = Unbuildable(hf.LlamaConfig(**(BASE | {"hidden_size": 4000})))
    with pytest.raises(ValueError, match="no tiny twin.*only 4000 will do.*verify=False"):
        verify.verify_class(target, "static")


def test_a_tested_class_is_not_tried_again_but_a_subclass_of_its_name_is(monkeypatch):
    def tried(*args):
        raise AssertionError("a twin was built")

    monkeypatch.setattr(verify, "build_twin", tried)
    td.compile(make_target("llama"), None, runtime="eager", max_length=64)
    same_name = type("LlamaForCausalLM", (hf.LlamaForCausalLM,), {})
    with pytest.raises(ValueError, match="a twin was built"):
        td.compile(build(same_name), None, runtime="eager", max_length=64)


def test_a_later_transformers_is_not_trusted(monkeypatch):
    assert is_tested(hf.LlamaForCausalLM)
    monkeypatch.setattr(hf, "__version__", "5.24.0")
    assert not is_tested(hf.LlamaForCausalLM)


def test_an_answer_is_remembered(monkeypatch):
    target = build(type("Once", (hf.LlamaForCausalLM,), {}))
    td.compile(target, None, runtime="eager", max_length=64)
    monkeypatch.setattr(verify, "build_twin", lambda model: pytest.fail("built twice"))
    td.compile(target, None, runtime="eager", max_length=32)


def test_a_full_size_target_takes_a_second_at_most():
    config = hf.Qwen3MoeConfig(
        vocab_size=151_936, num_experts=128, use_sliding_window=True, sliding_window=4096
    )
    with torch.device("meta"):
        target = hf.Qwen3MoeForCausalLM(config)
    before, started = torch.get_rng_state(), time.process_time()
    verify.verify_class(target, "static")
    assert time.process_time() - started < 1.5
    assert torch.equal(torch.get_rng_state(), before)
    assert target.config.hidden_size == config.hidden_size


def test_a_twin_has_every_kind_of_layer_and_short_windows():
    kinds = ["sliding_attention"] * 5 + ["full_attention"] + ["sliding_attention"] * 20
    config = hf.Gemma3TextConfig(layer_types=kinds, num_hidden_layers=26)
    small = twin.shrink(config)
    assert small.layer_types == ["sliding_attention", "sliding_attention", "full_attention"]
    assert small.num_hidden_layers == 3 and small.sliding_window == twin.WINDOW
    assert config.num_hidden_layers == 26 and config.layer_types == kinds


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gpt_oss"])
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_check_holds_the_real_weights(family, cache):
    agreement = td.check(make_target(family), cache=cache)
    assert agreement.holds and agreement.difference < 1e-4 and agreement.compared == 34


def test_check_sees_a_window_that_is_off_by_one(monkeypatch):
    target = make_target("gpt_oss")
    td.check(target)
    init = verify.Target.__init__

    def wider(self, model):
        init(self, model)
        self._windows = tuple(window and window + 1 for window in self._windows)

    monkeypatch.setattr(verify.Target, "__init__", wider)
    with pytest.raises(ValueError, match="logits differ"):
        td.check(target)


def test_check_reads_long_prompts_in_chunks_and_says_what_it_cannot():
    target = make_target("llama", max_position_embeddings=2048)
    assert td.check(target, length=1200).holds
    assert td.check(copy.deepcopy(target).to(torch.bfloat16)).holds
    with pytest.raises(ValueError, match="length=3"):
        td.check(target, length=3)
    with pytest.raises(TypeError, match="pass the target model first"):
        td.check(make_pair()[1])
    assert isinstance(target.model, LlamaModel)
