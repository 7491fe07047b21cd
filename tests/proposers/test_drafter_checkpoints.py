"""Checkpoints in and out: z-lab's layout, every published field, and refusals."""

import json

import pytest
import torch
from safetensors.torch import load_file
from support import tiny
from support.layouts import LAYOUTS, expected
from support.layouts import publish as publish_layout
from support.published import FIELDS, FULL, SLIDING, YARN, draft, publish, same_tensors
from transformers import PreTrainedConfig

import torch_dflash as td
from torch_dflash.proposers.checkpoints import load_drafter_config
from torch_dflash.proposers.dflash.config import default_target_layer_ids

LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}


def test_the_published_layout_loads_as_it_is(tmp_path):
    tensors = publish(tmp_path)
    assert len(tensors) == 2 * 11 + 3  # 58 for five layers
    drafter = td.DFlashDraftModel.from_pretrained(tmp_path)
    same_tensors(drafter, tensors)
    config = drafter.config
    assert (config.block_size, config.mask_token_id, config.target_layer_ids) == (8, 96, [0, 2])
    assert config.rope_parameters["rope_theta"] == 1000000
    assert not drafter.training
    out = td.generate(
        tiny.make_target(), drafter, torch.tensor([[1, 2, 3]]), max_new_tokens=5, runtime="eager"
    )
    assert out.shape == (1, 8)


@pytest.mark.parametrize(
    ("asked", "expected"),
    [({"dtype": torch.bfloat16}, torch.bfloat16), ({"dtype": "auto"}, torch.bfloat16),
     ({}, torch.bfloat16), ({"dtype": torch.float32}, torch.float32)],
)  # fmt: skip
def test_dtypes(tmp_path, asked, expected):
    tensors = publish(tmp_path)
    drafter = td.DFlashDraftModel.from_pretrained(tmp_path, **asked)
    assert {weight.dtype for weight in drafter.parameters()} == {expected} == {drafter.dtype}
    same_tensors(drafter, {name: tensor.to(expected) for name, tensor in tensors.items()})


def test_what_transformers_5_15_adds_as_it_reads_a_cache_is_no_field_of_a_network(tmp_path):
    tensors = publish(tmp_path, _commit_hash="0" * 40)
    same_tensors(td.DFlashDraftModel.from_pretrained(tmp_path), tensors)


@pytest.mark.parametrize("nested", [True, False])
def test_fields_nested_or_at_the_top(tmp_path, nested):
    layout = {"dflash_config": FIELDS, "block_size": ...} if nested else {"dflash_config": ..., **FIELDS}
    publish(tmp_path, **layout)
    config = td.DFlashDraftModel.from_pretrained(tmp_path).config
    assert {name: getattr(config, name) for name in FIELDS} == FIELDS
    assert config.dflash_config == FIELDS


def test_the_nested_field_wins(tmp_path):
    publish(tmp_path, dflash_config=FIELDS, block_size=16, mask_token_id=1)
    config = td.DFlashConfig.from_pretrained(tmp_path)
    assert (config.block_size, config.mask_token_id) == (4, 95)


def test_multiplier_and_soft_cap_shape_the_draft_logits(tmp_path):
    publish(tmp_path, dflash_config=FIELDS)
    drafter = td.DFlashDraftModel.from_pretrained(tmp_path)
    hidden = torch.linspace(-300, 300, 9)[None, None]
    expected = torch.tanh(hidden * 0.25 / 20) * 20
    torch.testing.assert_close(drafter.logits(hidden, lambda rows: rows), expected)


@pytest.mark.parametrize(
    ("layers", "taps", "expected"),
    [
        (36, 5, [1, 9, 17, 25, 33]), (32, 5, [1, 8, 15, 22, 29]), (64, 5, [1, 16, 31, 46, 61]),
        (24, 5, [1, 6, 11, 16, 21]), (48, 5, [1, 12, 23, 34, 45]), (40, 5, [1, 10, 19, 28, 37]),
        (61, 6, [1, 12, 24, 35, 47, 58]), (60, 6, [1, 12, 23, 35, 46, 57]), (36, 1, [18]),
    ],
)  # fmt: skip
def test_default_taps(layers, taps, expected):
    assert default_target_layer_ids(layers, taps) == expected
    config = td.DFlashConfig(num_target_layers=layers, num_hidden_layers=taps, mask_token_id=1)
    assert config.target_layer_ids == config.dflash_config["target_layer_ids"] == expected


def test_default_taps_and_block_of_a_checkpoint(tmp_path):
    publish(tmp_path, dflash_config={"mask_token_id": 96}, block_size=..., num_target_layers=9)
    config = td.DFlashDraftModel.from_pretrained(tmp_path).config
    assert (config.target_layer_ids, config.block_size) == ([1, 6], 16)


@pytest.mark.parametrize(
    ("kinds", "fields", "expected"),
    [
        ([FULL, FULL], {}, [(None, False)] * 2),
        ([SLIDING, FULL], {"sliding_window": 4}, [(4, True), (None, False)]),
        ([SLIDING, FULL], {"sliding_window": 4, "is_causal": False}, [(4, False), (None, False)]),
        ([SLIDING, FULL], {"sliding_window": 4, "is_causal": True}, [(4, True), (None, True)]),
        # A window that `use_sliding_window` would switch off counts in a layer of the sliding type.
        ([FULL, SLIDING], {"sliding_window": 4, "use_sliding_window": False}, [(None, False), (4, True)]),
        (
            ...,
            {"sliding_window": 4, "use_sliding_window": True, "max_window_layers": 1},
            [(None, False), (4, True)],
        ),
        (..., {}, [(None, False)] * 2),
    ],
)
def test_windows_and_causality(tmp_path, kinds, fields, expected):
    publish(tmp_path, **({"layer_types": kinds, "use_sliding_window": True} | fields))
    drafter = td.DFlashDraftModel.from_pretrained(tmp_path)
    assert [(layer.self_attn.window, layer.self_attn.causal) for layer in drafter.layers] == expected


@pytest.mark.parametrize("model_type", ["qwen3", "gpt_oss"])
def test_attention_bias_and_model_type(tmp_path, model_type):
    tensors = publish(tmp_path, attention_bias=True, model_type=model_type)
    drafter = td.DFlashDraftModel.from_pretrained(tmp_path)
    same_tensors(drafter, tensors)
    assert sum(name.endswith("bias") for name in tensors) == 8


@pytest.mark.parametrize(
    "rope", [{"rope_type": "linear", "factor": 2.0}, YARN, LLAMA3 | {"original_max_position_embeddings": 64}]
)
@pytest.mark.parametrize("layout", ["rope_scaling", "rope_parameters"])
def test_static_rope_types(tmp_path, rope, layout):
    publish(tmp_path, rope_theta=100)
    plain = draft(td.DFlashDraftModel.from_pretrained(tmp_path))
    old = {"rope_scaling": rope, "rope_theta": 100}
    new = {"rope_parameters": rope | {"rope_theta": 100}, "rope_scaling": ..., "rope_theta": ...}
    scaled = old if layout == "rope_scaling" else new
    publish(tmp_path, **scaled)
    drafter = td.DFlashDraftModel.from_pretrained(tmp_path)
    assert drafter.config.rope_parameters["rope_type"] == rope["rope_type"]
    assert drafter.config.rope_parameters["rope_theta"] == 100
    assert (draft(drafter) - plain).abs().max() > 1e-3


def test_round_trip(tmp_path):
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    tensors = publish(
        first, dflash_config=FIELDS, rope_scaling=YARN, layer_types=[SLIDING, FULL], sliding_window=4
    )
    drafter = td.DFlashDraftModel.from_pretrained(first)
    drafter.save_pretrained(second)
    saved = json.loads((second / "config.json").read_text())
    assert "auto_map" not in saved
    assert saved["architectures"] == ["DFlashDraftModel"] and saved["model_type"] == "qwen3"
    assert {name: saved[name] for name in FIELDS} == saved["dflash_config"] == FIELDS
    assert load_file(second / "model.safetensors").keys() == tensors.keys()
    again = td.DFlashDraftModel.from_pretrained(second)
    same_tensors(again, tensors)
    assert again.config.to_dict() == drafter.config.to_dict() | {"_name_or_path": again.config._name_or_path}
    assert torch.equal(draft(again), draft(drafter))


@pytest.mark.parametrize("name", LAYOUTS)
def test_its_config_is_read_once(name, tmp_path, monkeypatch):
    """At the hub each reading would be a request, and could give another revision."""
    publish_layout(tmp_path, name, expected(name))
    read, files = PreTrainedConfig._dict_from_json_file.__func__, []
    told = classmethod(lambda cls, file: files.append(file) or read(cls, file))
    monkeypatch.setattr(PreTrainedConfig, "_dict_from_json_file", told)
    drafter = td.load_drafter(tmp_path)
    type(drafter).from_pretrained(tmp_path)
    load_drafter_config(tmp_path)
    assert files == [str(tmp_path / "config.json")] * 3


@pytest.mark.parametrize("change", [{"block_size": 5}, {"mask_token_id": 7}, {"output_multiplier": 0.5}])
def test_a_field_that_was_set_is_saved_in_both_places(change, tmp_path):
    publish(tmp_path, dflash_config=FIELDS)
    ((name, value),) = change.items()
    set_before = td.load_drafter(tmp_path, **change)
    set_after = td.load_drafter(tmp_path)
    setattr(set_after.config, name, value)
    for number, drafter in enumerate((set_before, set_after)):
        folder = tmp_path / str(number)
        drafter.save_pretrained(folder)
        saved = json.loads((folder / "config.json").read_text())
        assert saved[name] == saved["dflash_config"][name] == value
        assert getattr(td.load_drafter(folder).config, name) == value
