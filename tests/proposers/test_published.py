"""Published drafters: real shapes, the authors' own class, and refusals."""

import json

import pytest
import torch
from dflash.model import DFlashDraftModel as AuthorsModel
from safetensors.torch import save_file
from support import ROOT, tiny
from support.published import FULL, SLIDING, YARN, draft, publish, same_tensors, tensors_for
from transformers import AutoConfig, AutoModelForCausalLM

import torch_dflash as td
from torch_dflash.proposers.pair import check_pair

CONFIGS = ROOT / "benchmarks/configs"
TARGETS = ["qwen3-4b", "qwen3-8b", "llama-3.1-8b", "qwen3-coder-30b-a3b", "gpt-oss-20b"]
REAL = {name: json.loads((CONFIGS / f"{name}-dflash/config.json").read_text()) for name in TARGETS}
REAL["qwen3.5-27b"] = {
    "num_hidden_layers": 6, "block_size": 16, "hidden_size": 5120, "intermediate_size": 17408,
    "num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 248320,
    "num_target_layers": 64, "layer_types": [SLIDING] * 5 + [FULL], "max_position_embeddings": 40960,
    "dflash_config": {"mask_token_id": 248070, "target_layer_ids": [1, 16, 31, 46, 61]},
    "rope_theta": 10000000, "sliding_window": 4096, "use_sliding_window": True,
}  # fmt: skip
# Parameters of the published weight files, in billions.
SIZES = {
    "qwen3-4b": (4.02, 0.537), "qwen3-8b": (8.19, 1.049), "llama-3.1-8b": (8.03, 1.049),
    "qwen3-coder-30b-a3b": (30.53, 0.474), "gpt-oss-20b": (20.91, 0.785),
}  # fmt: skip


def read(folder, raw):
    publish(folder, tensors={}, **raw)
    return td.DFlashConfig.from_pretrained(folder)


@pytest.mark.parametrize("name", REAL)
def test_real_configs_give_the_published_tensors(tmp_path, name):
    raw = REAL[name]
    config = read(tmp_path, raw)
    with torch.device("meta"):
        drafter = td.DFlashDraftModel(config)
    small = raw | {"hidden_size": 1, "intermediate_size": 1, "head_dim": 1}
    assert drafter.state_dict().keys() == tensors_for(small).keys()
    if not raw.get("attention_bias"):
        assert len(drafter.state_dict()) == 11 * raw["num_hidden_layers"] + 3
    hidden, taps = raw["hidden_size"], raw["dflash_config"]["target_layer_ids"]
    assert drafter.fc.weight.shape == (hidden, len(taps) * hidden)
    attention = drafter.layers[0].self_attn
    assert attention.q_proj.weight.shape == (raw["num_attention_heads"] * raw["head_dim"], hidden)
    assert attention.k_proj.weight.shape == (raw["num_key_value_heads"] * raw["head_dim"], hidden)
    assert drafter.layers[0].mlp.gate_proj.weight.shape == (raw["intermediate_size"], hidden)
    assert (config.block_size, config.mask_token_id) == (
        raw["block_size"], raw["dflash_config"]["mask_token_id"],
    )  # fmt: skip
    assert config.target_layer_ids == taps
    assert config.rope_parameters["rope_theta"] == raw.get("rope_theta", 1000000)
    if name == "qwen3.5-27b":
        kinds = [(layer.self_attn.window, layer.self_attn.causal) for layer in drafter.layers]
        assert kinds == [(4096, True)] * 5 + [(None, False)]


@pytest.mark.parametrize("name", TARGETS)
def test_real_configs_fit_their_targets_and_have_the_published_size(name):
    with torch.device("meta"):
        target = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(CONFIGS / name))
        drafter = td.DFlashDraftModel(td.DFlashConfig.from_pretrained(CONFIGS / f"{name}-dflash"))
    check_pair(target, drafter)
    sizes = tuple(sum(weight.numel() for weight in model.parameters()) / 1e9 for model in (target, drafter))
    assert sizes == pytest.approx(SIZES[name], abs=0.01)


@pytest.mark.parametrize("name", REAL)
def test_real_configs_shrunk_equal_the_authors_model(tmp_path, name):
    raw = REAL[name] | {"hidden_size": 32, "intermediate_size": 48, "head_dim": 8, "sliding_window": 5}
    if not raw.get("use_sliding_window"):
        raw["sliding_window"] = None
    assert_same_as_authors(tmp_path, publish(tmp_path, **raw))


def assert_same_as_authors(folder, tensors):
    ours = td.DFlashDraftModel.from_pretrained(folder, dtype=torch.float32)
    theirs = AuthorsModel.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    same_tensors(theirs, {name: tensor.float() for name, tensor in tensors.items()})
    assert theirs.target_layer_ids == ours.config.target_layer_ids
    assert (theirs.block_size, theirs.mask_token_id) == (ours.config.block_size, ours.config.mask_token_id)

    class Same:  # the authors' argument names
        config = ours.config

        def float(self):
            return lambda noise, context, position: type("Out", (), {
                "last_hidden_state": theirs(
                    position_ids=position, noise_embedding=noise, target_hidden=context
                )
            })  # fmt: skip

    torch.testing.assert_close(draft(ours), draft(Same()), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"attention_bias": True, "rope_scaling": YARN},
        {"layer_types": [SLIDING, FULL], "sliding_window": 4, "use_sliding_window": True},
        {"layer_types": [SLIDING, FULL], "sliding_window": 4, "use_sliding_window": True, "is_causal": False},
        {"dflash_config": {"mask_token_id": 96}, "num_target_layers": 9, "block_size": ...},
    ],
)
def test_the_authors_class_loads_what_we_save(tmp_path, changes):
    published, saved = tmp_path / "published", tmp_path / "saved"
    published.mkdir()
    tensors = publish(published, **changes)
    assert_same_as_authors(published, tensors)
    td.DFlashDraftModel.from_pretrained(published).save_pretrained(saved)
    assert_same_as_authors(saved, tensors)


def test_sharded_weights(tmp_path):
    tensors = publish(tmp_path)
    drafter = td.DFlashDraftModel.from_pretrained(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    drafter.save_pretrained(tmp_path, max_shard_size="4KB")
    assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
    same_tensors(td.DFlashDraftModel.from_pretrained(tmp_path), tensors)


def without(name):
    return lambda tensors: {key: tensor for key, tensor in tensors.items() if key != name}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("layers.1.self_attn.q_norm.weight"), "missing_keys.*layers.1.self_attn.q_norm.weight"),
        (without("fc.weight"), "missing_keys.*fc.weight"),
        (lambda tensors: tensors | {"markov.weight": torch.ones(97, 32)}, "unexpected_keys.*markov.weight"),
        (
            lambda tensors: tensors | {"fc.weight": torch.ones(32, 96)},
            r"target_layer_ids=.*fc.weight.*32, 96",
        ),
    ],
)
def test_weights_that_are_not_the_configs(tmp_path, change, message):
    tensors = publish(tmp_path)
    save_file(change(tensors), tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        td.DFlashDraftModel.from_pretrained(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    tensors = publish(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"holds no \*.safetensors: only.*save_pretrained"):
        td.DFlashDraftModel.from_pretrained(tmp_path)
    torch.save(tensors, tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pytorch_model.bin: only safetensors are read"):
        td.DFlashDraftModel.from_pretrained(str(tmp_path))
    with pytest.raises(ValueError, match="use_safetensors=False"):
        td.DFlashDraftModel.from_pretrained(tmp_path, use_safetensors=False)


SPECULATORS = {
    "architectures": ["DFlashSpeculator"], "speculators_model_type": "dflash", "block_size": 8,
    "transformer_layer_config": {"hidden_size": 32}, "aux_hidden_state_layer_ids": [1, 3],
}  # fmt: skip
DFLASH2 = {
    "architectures": ["DFlash2DraftModel"], "model_type": "qwen3", "is_causal": False,
    "dflash_config": {
        "block_size": 16, "conv_group_size": 16, "conv_kernel_size": 2, "final_logit_softcapping": 20.0,
        "mask_token_id": 201818, "output_multiplier": 0.19611613513818404, "selector_rank": 256,
        "selector_top_k": 16, "target_layer_ids": [1, 13, 25, 37, 49],
    },
}  # fmt: skip
ASSISTANT = {
    "architectures": ["MuseGlimmerAssistantModel"], "model_type": "muse_glimmer_assistant",
    "block_size": 16, "mask_token_id": 201818, "target_layer_ids": [1, 13, 25, 37, 49],
}  # fmt: skip
CAUSAL = {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "hidden_size": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (DFLASH2, "DFlash2DraftModel.*a DFlash2 drafter, not a DFlash v1 one.*load_drafter"),
        (DFLASH2 | {"architectures": None}, "a DFlash2 drafter, not a DFlash v1 one"),
        (SPECULATORS, "mask_token_id is missing"),
        (ASSISTANT, "num_hidden_layers=5 in .*its weights have 0"),
        (CAUSAL, "Qwen3ForCausalLM.*not a DFlash drafter.*drafter's directory"),
        ({"architectures": ["DFlashDraftModel"], "model_type": "qwen3"}, "target_layer_ids=None"),
    ],
)
def test_directories_that_hold_no_dflash_v1_drafter(tmp_path, config, message):
    (tmp_path / "config.json").write_text(json.dumps(config))
    save_file({"norm.weight": torch.ones(4)}, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=message):
        td.DFlashDraftModel.from_pretrained(tmp_path)


def test_a_target_is_no_drafter(tmp_path):
    tiny.make_target().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="Qwen3ForCausalLM.*not a DFlash drafter"):
        td.DFlashDraftModel.from_pretrained(tmp_path)
