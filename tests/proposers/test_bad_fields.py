"""Every layout refuses fields and tensors of the wrong type by name, value and fix."""

import json

import pytest
import torch
from support.layouts import expected, fixture, pair, publish
from support.refusals import refuses

import torch_dflash as td

SLIDING = "sliding_attention"
WRONG = [
    ("assistant", {"block_size": "x"}, ["block_size='x' in", "expected int", "correct it in config.json"]),
    ("assistant", {"eos_token_id": [1, 2]}, ["eos_token_id=[1, 2] in", "correct it in config.json"]),
    ("assistant", {"layer_types": [SLIDING] * 3}, ["layer_types=[", "(3)", "correct it in"]),
    ("assistant", {"dtype": "x"}, ["dtype='x' in", "torch has no such type"]),
    ("laguna", {"layer_types": 3}, ["layer_types=3 in", "one entry per layer"]),
    ("laguna", {"layer_types": []}, ["layer_types=[] in", "one entry per layer"]),
    ("laguna", {"head_dim": "x"}, ["head_dim='x' in", "positive integer"]),
    ("laguna", {"intermediate_size": 3}, ["gate_up_proj", "[3, 3]", "intermediate_size"]),
    ("laguna", {"rope_parameters": 3}, ["rope_parameters=3 in", "must be an object"]),
    ("mimo", {"num_hidden_layers": ...}, ["num_hidden_layers is missing"]),
    ("mimo", {"num_hidden_layers": 1.5}, ["num_hidden_layers=1.5 in", "positive integer"]),
    ("speculators", {"speculators_model_type": ["dflash"]}, ["speculators_model_type=['dflash'] in"]),
    ("speculators", {"sliding_window_non_causal": "no"}, ["non_causal='no' in", "true or false"]),
    ("speculators", {"mask_token_id": 97}, ["mask_token_id=97", "drafter's own embedding (97 rows)"]),
    ("speculators_dflash2", {"conv_group_size": None}, ["conv_group_size=None", "trained with"]),
    ("speculators_dflash2", {"selector_rank": None}, ["selector_rank=None", "trained with"]),
    ("zlab_flat", {"tensors": {"fc.weight": torch.ones(32, 64, dtype=torch.int8)}},
     ["fc.weight in", "stored as torch.int8", "plain weights"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "changes", "words"), WRONG)
def test_a_field_of_the_wrong_type_is_named(name, changes, words, tmp_path):
    publish(tmp_path, name, pair(name)[1], **changes)
    with refuses(ValueError, *words):
        td.load_drafter(tmp_path)


def test_so_is_one_of_the_network_within(tmp_path):
    publish(tmp_path, "speculators", pair("speculators")[1])
    within = fixture("speculators")[0]["transformer_layer_config"]
    for change, words in (
        ({"model_type": ["llama"]}, ["model_type=['llama'] in transformer_layer_config", "none of that"]),
        (
            {"model_type": "llama", "num_hidden_layers": "x"},
            ["num_hidden_layers='x' in transformer_layer_config", "correct it"],
        ),
    ):
        config = fixture("speculators")[0] | {"transformer_layer_config": within | change}
        (tmp_path / "config.json").write_text(json.dumps(config))
        with refuses(ValueError, *words):
            td.load_drafter(tmp_path)


@pytest.mark.parametrize("written", ["[]", "null", "3", '"x"'])
def test_what_is_no_object_is_no_config(written, tmp_path):
    publish(tmp_path, "zlab_flat", expected("zlab_flat"))
    (tmp_path / "config.json").write_text(written)
    with refuses(ValueError, "config.json in", "no JSON object", "fetch it again"):
        td.load_drafter(tmp_path)
