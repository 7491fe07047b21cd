"""Models that also read images decode text; images, and ids that stand for them, are refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.refusals import refuses
from support.taps import build, drafter_for
from transformers import AutoModelForImageTextToText
from transformers.models.llama import modeling_llama

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.aot.compile import abstract_pair
from jax_bridge.aot.floor import floor_of
from jax_bridge.weights.formats import unwrap
from torch_dflash.requests.prompts import media_tokens
from torch_dflash.targets.auto import auto_class
from torch_dflash.targets.experts import EXPERTS
from torch_dflash.targets.skeleton import build_skeleton, configs_of
from torch_dflash.verify.twin import build_twin

IMAGE = 94  # every id of the tiny configs that stands for an image, a video or sound
PROMPT = torch.tensor([[5, 8, 13, 21, 34, 55]])
GREEDY = {"max_new_tokens": 8, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
FIELDS = {
    "gemma3": {"image_token_id", "boi_token_id", "eoi_token_id"},
    "gemma4": {"image_token_id", "video_token_id", "audio_token_id"},
    "gemma4_unified": {"image_token_id", "video_token_id", "audio_token_id"},
    "mistral3": {"image_token_id"},
    "llava": {"image_token_id"},
    "qwen2_vl": {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"},
    "qwen3_vl": {"image_token_id", "video_token_id", "vision_start_token_id", "vision_end_token_id"},
    "phi4_multimodal": {"image_token_id", "audio_token_id"},
    "llama": set(),
    "gpt2": set(),
}


def named(target):
    return {name.replace("_index", "_id") for _, name in media_tokens(target.config)}


@pytest.mark.parametrize("door", [td.check, lambda one: td.generate(one, None, PROMPT, runtime="eager")])
def test_segments_in_a_mask_are_no_images_groups(monkeypatch, door):
    create = modeling_llama.create_causal_mask

    def packed(**given):
        own = torch.arange(4096, device=given["inputs_embeds"].device)[None] // 64
        return create(**given, and_mask_function=lambda b, h, query, key: own[0, query] == own[0, key])

    monkeypatch.setattr(modeling_llama, "create_causal_mask", packed)
    with refuses(ValueError, "mask"):
        door(build("llama"))


@pytest.mark.parametrize("case", FIELDS)
def test_the_ids_that_stand_for_media_are_known_by_the_configs_fields(case):
    found = named(build(case))
    assert found >= FIELDS[case] and (FIELDS[case] or not found)


@pytest.mark.parametrize("case", ["gemma3", "mistral3", "qwen2_vl"])
def test_a_token_that_stands_for_an_image_is_refused(case):
    target = build(case)
    for config in (target.config, target.config.get_text_config()):
        config.bos_token_id = config.pad_token_id = config.eos_token_id = None
    prompts = torch.tensor([[5, 8, 13], [5, IMAGE, 13]])
    engine = td.compile(target, None, runtime="eager", max_length=64, batch_size=2)
    at_once = partial(td.generate, target, None, runtime="eager")
    for call in (engine.generate, at_once):
        with refuses(ValueError, f"input_ids of row 1 holds {IMAGE}", "own generate"):
            call(prompts, **GREEDY)
    with refuses(ValueError, f"holds {IMAGE}", "own generate"):
        next(iter(engine.stream(prompts, **GREEDY)))
    dflash: Any = td.dflash(None, runtime="eager")
    with refuses(ValueError, f"holds {IMAGE}", "own generate"):
        target.generate(prompts, custom_generate=dflash, attention_mask=torch.ones_like(prompts), **GREEDY)


def test_a_mark_that_texts_end_with_is_no_image():
    """Some configs name one id for both, and a chat holds it in every turn."""
    target, ids = build("llava"), torch.tensor([[5, IMAGE, 13]])
    target.config.get_text_config().eos_token_id = [1, IMAGE]
    whole = torch.ones_like(ids)
    wanted = target.generate(ids, attention_mask=whole, **GREEDY)
    got = td.generate(target, None, ids, attention_mask=whole, runtime="eager", **GREEDY)
    assert torch.equal(got, wanted)


@pytest.mark.parametrize(
    ("case", "given"),
    [
        ("gemma3", {"pixel_values": torch.zeros(1, 3, 4, 4)}),
        ("gemma3", {"token_type_ids": torch.ones_like(PROMPT)}),
        ("qwen2_vl", {"image_grid_thw": torch.ones(1, 3)}),
        ("qwen2_vl", {"pixel_values_videos": torch.zeros(4, 8)}),
        ("qwen2_vl", {"mm_token_type_ids": torch.ones_like(PROMPT)}),
        ("qwen2_audio", {"input_features": torch.zeros(1, 8, 4)}),
    ],
)
def test_images_videos_and_sound_are_refused(case, given):
    target, name = build(case), next(iter(given))
    with refuses(ValueError, name, "text alone"):
        td.generate(target, None, PROMPT, **given, runtime="eager", **GREEDY)


def test_a_mask_with_numbers_of_image_groups_is_that_of_text():
    target = build("gemma4_unified")  # each layer's mask reads them, and for text all are -1
    ids, options = torch.cat([PROMPT, torch.tensor([[0, 0, 89, 3, 7, 7]])]), GREEDY | {"max_new_tokens": 24}
    wanted = target.generate(ids, attention_mask=(mask := ids.gt(0).long()), **options)
    drafter = drafter_for(target)
    for drafts in (td.NGramProposer(4), drafter, td.TreeProposer(drafter, rows=8)):
        got = td.generate(target, drafts, ids, attention_mask=mask, runtime="eager", **options)
        assert torch.equal(got, wanted)
    text = target.config.get_text_config()
    text.bos_token_id, text.pad_token_id, text.eos_token_id = None, 0, None
    with refuses(ValueError, f"holds {IMAGE}", "own generate"):
        td.generate(target, None, torch.tensor([[5, IMAGE, 13]]), runtime="eager", **GREEDY)


@pytest.mark.parametrize("case", ["gemma3", "qwen2_vl"])
def test_what_a_processor_adds_to_text_is_taken(case):
    target = build(case)
    zeros = torch.zeros_like(PROMPT)
    extra = {"gemma3": {"token_type_ids": zeros}, "qwen2_vl": {"mm_token_type_ids": zeros}}[case]
    wanted = target.generate(PROMPT, attention_mask=zeros + 1, **extra, **GREEDY)
    assert torch.equal(td.generate(target, None, PROMPT, **extra, runtime="eager", **GREEDY), wanted)


def test_mixed_positions_are_those_of_text():
    """After images a model shifts positions (rope deltas); a later prompt of text has the usual positions."""
    target = build("qwen2_vl")
    drafter = drafter_for(target)
    wanted = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)
    target.model.rope_deltas = torch.tensor([[-7]])
    assert torch.equal(td.generate(target, drafter, PROMPT, runtime="eager", **GREEDY), wanted)


@pytest.mark.parametrize("case", ["gemma3", "llava", "mistral3", "qwen2_vl", "qwen3_vl"])
def test_a_checkpoint_of_any_layout_is_read_into_arrays(tmp_path, case):
    target = build(case)
    target.save_pretrained(tmp_path)  # under the names of the published files
    loaded = jb.load(tmp_path, progress=False)
    arrays, wanted = unwrap(loaded.arrays), dict(target.named_parameters())
    assert type(loaded.model) is type(target)
    assert wanted.keys() <= arrays.keys()
    for name, weight in wanted.items():
        assert torch.equal(jb.to_torch(arrays[name]), weight), name


@pytest.mark.heavy
def test_a_loaded_checkpoint_is_drafted_for(tmp_path):
    target = build("mistral3")
    drafter = drafter_for(target)
    target.save_pretrained(tmp_path)
    loaded: Any = jb.load(tmp_path, progress=False)
    wanted = target.generate(PROMPT, attention_mask=torch.ones_like(PROMPT), **GREEDY)
    assert torch.equal(td.generate(loaded, drafter, PROMPT, runtime="xla", **GREEDY), wanted)


def test_a_checkpoint_that_lacks_a_weight_of_text_is_refused(tmp_path):
    target = build("llava")
    target.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    name = next(name for name in tensors if "language_model" in name and "layers.2.mlp.up_proj" in name)
    save_file({other: tensor for other, tensor in tensors.items() if other != name}, file, {"format": "pt"})
    with refuses(ValueError, "model.language_model.layers.2.mlp.up_proj.weight", "is missing"):
        jb.load(tmp_path, progress=False)


def test_a_tower_for_images_is_no_part_of_the_least_that_a_pass_reads():
    config, floors = build("llava").config, []
    for depth in (1, 7):
        config.vision_config.num_hidden_layers = depth
        model = abstract_pair(config, None, capacity=64, batch_size=1)
        floors.append(floor_of(model.pair, model.params, 32).verify)
    assert floors[0] == floors[1] > 0


def test_classes_of_images_and_text_are_found_by_the_config():
    target = build("mistral3")
    assert auto_class(target.config) is AutoModelForImageTextToText
    assert type(auto_class(target.config).from_config(target.config)) is type(target)
    # A causal LM to transformers.
    assert auto_class(build("gemma3").config) is not AutoModelForImageTextToText


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
