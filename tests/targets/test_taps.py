"""A tap is the output of a layer's block at any place: transformers' ``hidden_states[tap + 1]``."""

import json
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from support import ROOT
from support.families import MORE
from support.taps import CONFIGS, build, drafter_for, gap
from support.tiny import BASE, correlate, make_drafter, make_target, randomise
from torch import nn

import torch_dflash as td
from torch_dflash.targets import blocks as blocks_module
from torch_dflash.targets import trace
from torch_dflash.targets.final_norm import final_norm
from torch_dflash.targets.trace import blocks_of
from torch_dflash.train.features.extract import FeatureExtractor

EXACT = 4e-5
SEEN = 1e-2
RESULTS = json.loads((ROOT / "docs/results/families.json").read_text())["families"]
EQUAL = [
    name
    for name, one in RESULTS.items()
    if any(run["outcome"] in ("equal", "tie") for run in one["runs"].values())
]


# The places of layers, and the module behind the last layer.
LAYOUTS = {
    "gpt2": ("transformer.h.3", "transformer.ln_f"),
    "gpt_neox": ("gpt_neox.layers.3", "gpt_neox.final_layer_norm"),
    "opt": ("model.decoder.layers.3", "model.decoder.final_layer_norm"),
    "opt:post": ("model.decoder.layers.3", None),
    "ctrl": ("transformer.h.3", "transformer.layernorm"),
    "bert": ("bert.encoder.layer.3", None),
    "modernbert-decoder": ("model.layers.3", None),
    "biogpt": ("biogpt.layers.3", "biogpt.layer_norm"),
    "granite": ("model.layers.3", "model.norm"),
    "gemma2": ("model.layers.3", "model.norm"),
    "gemma3": ("model.language_model.layers.3", "model.language_model.norm"),
    "gemma4_unified": ("model.language_model.layers.3", "model.language_model.norm"),
    "gemma4": ("model.language_model.layers.3", "model.language_model.norm"),
    "fuyu": ("model.language_model.layers.3", "model.language_model.final_layernorm"),
    "llava": ("model.language_model.layers.3", "model.language_model.norm"),
    "mistral3": ("model.language_model.layers.3", "model.language_model.norm"),
    "qwen2_5_vl": ("model.language_model.layers.3", "model.language_model.norm"),
    "qwen3_vl": ("model.language_model.layers.3", "model.language_model.norm"),
    "smolvlm": ("model.text_model.layers.3", "model.text_model.norm"),
}
UNTAPPED = ("opt:projected", "hy_v4", "paligemma", "glm5_next")
"""Layers without one state of the embedding's width, and targets that are refused."""
REST = [case for case in (*EQUAL, *CONFIGS["MULTIMODAL"]) if case not in (*LAYOUTS, *UNTAPPED)]


@pytest.mark.parametrize("case", LAYOUTS)
def test_a_tap_is_a_blocks_output(case):
    target = build(case)
    found = blocks_of(target)
    assert (found.paths[-1], found.norm) == LAYOUTS[case]
    assert final_norm(target) is (found.norm and target.get_submodule(found.norm))
    assert gap(target) < EXACT


@pytest.mark.heavy
@pytest.mark.parametrize("case", REST)
def test_a_tap_is_a_blocks_output_in_every_family(case):
    assert gap(build(case)) < EXACT


def off_by_one(found):
    return replace(found, paths=found.paths[1:] + found.paths[:1])


def of_the_vision_tower(found):
    return replace(found, paths=tuple(f"model.vision_tower.encoder.layers.{i}" for i in range(4)))


def before_the_residual(found):
    return replace(found, paths=tuple(f"{path}.mlp" for path in found.paths))


@pytest.mark.parametrize("broken", [off_by_one, of_the_vision_tower, before_the_residual])
def test_a_tap_of_something_else_is_seen(monkeypatch, broken):
    target, find = build("llava"), trace.find_blocks
    monkeypatch.setattr(trace, "find_blocks", lambda *found: broken(find(*found)))
    try:
        assert gap(target) > SEEN
    except KeyError:  # nothing ran there
        assert broken is of_the_vision_tower


def test_a_target_of_one_layer_has_a_tap():
    target = make_target("qwen3", num_hidden_layers=1)
    assert blocks_of(target).paths == ("model.layers.0",)
    assert gap(target) < EXACT


def test_what_does_not_run_for_text_is_known():
    assert blocks_of(build("llava")).idle == ("model.vision_tower", "model.multi_modal_projector")
    assert blocks_of(build("gpt2")).idle == blocks_of(make_target("gpt_oss")).idle == ()


def test_features_for_training_are_the_taps():
    target, rows = build("gpt2"), [[5, 8, 13, 21, 34], [3, 9]]
    eager = FeatureExtractor(target, (0, 3), torch.float32, "eager")(rows)
    compiled = FeatureExtractor(target, (0, 3), torch.float32, "xla")(rows)
    for row, ids in enumerate(rows):
        torch.testing.assert_close(eager[row, : len(ids)], compiled[row, : len(ids)], rtol=1e-4, atol=1e-4)


class Doubling(nn.ModuleList):  # layers that get twice the output of the layer before
    def __getitem__(self, at):
        return [partial(self.doubled, layer) for layer in list(self)[at]]

    @staticmethod
    def doubled(layer, hidden, **more):
        return layer(hidden * 2, **more)


class Between(hf.LlamaModel):  # a change between two blocks, in no block's output
    def __init__(self, config):
        super().__init__(config)
        self.layers = Doubling(list(self.layers))


class Pairs(nn.Module):  # two layers in one module
    def __init__(self, layers):
        super().__init__()
        self.inner = nn.ModuleList(layers)

    def forward(self, hidden, **more):
        for layer in self.inner:
            hidden = layer(hidden, **more)
        return hidden


class Paired(hf.LlamaModel):
    def __init__(self, config):
        super().__init__(config)
        layers = list(self.layers)
        self.layers = nn.ModuleList([Pairs(layers[:2]), Pairs(layers[2:])])
        self.config.num_hidden_layers = 4

    def forward(self, **given):
        layers, self.config.num_hidden_layers = self.config.num_hidden_layers, 2
        try:
            return super().forward(**given)
        finally:
            self.config.num_hidden_layers = layers


@pytest.mark.parametrize(
    ("kind", "words"), [(Between, "does not get the result of"), (Paired, "has no module of its own")]
)
def test_what_is_no_plain_row_of_blocks_is_not_tapped(kind, words):
    class Model(hf.LlamaForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.model = kind(config)

    target = randomise(Model(hf.LlamaConfig(**BASE)), 0)
    with pytest.raises(ValueError, match=f"{words}.*NGramProposer"):
        td.compile(target, drafter_for(target), runtime="eager", max_length=64, verify=False)
    with pytest.raises(ValueError, match=words):
        FeatureExtractor(target, (0,), torch.float32, "eager")


def test_what_cannot_be_tapped_decodes_without_taps():
    """OPT-350m's layers are wider than its embedding."""
    target, ids = randomise(build("opt:projected"), 3, 1.0), torch.arange(5, 16)[None]
    options: Any = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None}
    theirs = target.generate(ids, **options)
    assert torch.equal(td.generate(target, td.NGramProposer(4), ids, **options, runtime="eager"), theirs)
    with pytest.raises(ValueError, match="hidden_size=32.*NGramProposer"):
        td.generate(target, drafter_for(target), ids, **options, runtime="eager")


def test_two_states_of_a_block_are_not_guessed_between():
    recorded = trace.CallRecorder(hf.LlamaForCausalLM(hf.LlamaConfig(**BASE)))
    state, other = torch.zeros(1, 2, 32), torch.zeros(1, 2, 32)
    paths = [f"model.layers.{layer}" for layer in range(2)]
    for layer, given in enumerate(([state], [state, other])):
        recorded.calls.append(blocks_module._Call(paths[layer], given, (state, other)))
        recorded.callers[layer] = ("", "model", paths[layer])
    assert "more than one state" in (blocks_module.find_blocks(recorded, 2).fault or "")


LOSSLESS = ("gpt2", "gpt_neox", "opt", "gemma3", "mistral3", "qwen2_5_vl")
QUICK = {"gpt2": "paged", "qwen2_5_vl": "static"}


def agreeing(case):
    target = build(case)
    correlate(target, drafter := drafter_for(target), 8.0)
    return target, drafter


def same_text(case, **options):
    target, drafter = agreeing(case)
    prompt = torch.randint(3, 93, (1, 11), generator=torch.Generator().manual_seed(1))
    asked = {"max_new_tokens": 24, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
    wanted = target.generate(prompt, attention_mask=torch.ones_like(prompt), **asked)
    out: Any = td.generate(target, drafter, prompt, **asked, **options, return_dict_in_generate=True)
    assert torch.equal(out.sequences, wanted)
    assert out.stats.rounds < 23  # some drafts were right


@pytest.mark.parametrize("case", LOSSLESS)
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_a_drafter_with_taps_is_lossless(case, cache):
    same_text(case, runtime="eager", cache=cache)


@pytest.mark.parametrize("case", QUICK)
def test_a_drafter_with_taps_is_lossless_in_a_program(case):
    same_text(case, runtime="xla", cache=QUICK[case])


@pytest.mark.heavy
@pytest.mark.parametrize("case", [case for case in LOSSLESS if case not in QUICK])
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_a_drafter_with_taps_is_lossless_in_every_program(case, cache):
    same_text(case, runtime="xla", cache=cache)


@pytest.mark.parametrize("family", MORE)
def test_greedy_text_equals_transformers(family):
    cls, config, extra = MORE[family]
    torch.manual_seed(0)
    target = randomise(cls(config(**(BASE | extra))), 0)
    ids = torch.randint(0, 96, (1, 11), generator=torch.Generator().manual_seed(1))
    wanted = target.generate(ids, max_new_tokens=24, do_sample=False)
    for drafter in (make_drafter(target), td.NGramProposer(5)):
        got = td.generate(target, drafter, ids, max_new_tokens=24, do_sample=False, runtime="eager")
        assert torch.equal(got, wanted)
