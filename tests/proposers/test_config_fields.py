"""A config.json with absurd fields is refused by name, before anything is built or allocated."""

import json
import signal
from contextlib import contextmanager

import pytest
from safetensors.torch import load_file
from support.published import FIELDS, FULL, PUBLISHED, SLIDING, publish, same_tensors, tensors_for
from support.refusals import refuses
from support.tiny import make_target
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlavaConfig,
    OPTConfig,
    Phi3Config,
)

import jax_bridge as jb
import torch_dflash as td
from torch_dflash.checks import check_static_rope
from torch_dflash.proposers.pair import check_pair

HUGE = (10**9, 10**12, 10**30)


@contextmanager
def seconds(limit):
    """Raises in a body that hangs, without a wait for its end."""

    def ring(*args):
        raise TimeoutError(f"took longer than {limit} s")

    before = signal.signal(signal.SIGALRM, ring)
    signal.alarm(limit)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    make_target("llama").save_pretrained(folder)
    return folder, json.loads((folder / "config.json").read_text())


@pytest.fixture
def target(saved):
    """Writes the target's config.json with changes; restores it."""
    folder, fields = saved

    def write(**changes):
        (folder / "config.json").write_text(json.dumps(fields | changes))
        return folder

    yield write
    write()


SIZES = ["hidden_size", "vocab_size", "intermediate_size", "head_dim", "num_attention_heads"]
ABSURD = [(name, value) for name in (*SIZES, "num_key_value_heads") for value in HUGE]
ABSURD += [
    (name, value) for name in (*SIZES, "num_hidden_layers", "num_key_value_heads") for value in (-1, "x")
]
ABSURD += [(name, 0) for name in ("hidden_size", "vocab_size", "num_hidden_layers", "num_attention_heads")]
ABSURD += [("num_hidden_layers", 10**8), ("num_hidden_layers", 10**12), ("hidden_size", 32.0)]
ABSURD += [("dtype", "float8"), ("dtype", 3), ("torch_dtype", "float8"), ("quantization_config", "x")]


@pytest.mark.parametrize(("name", "value"), ABSURD)
def test_a_target_of_absurd_fields_is_refused_before_it_is_built(target, monkeypatch, name, value):
    monkeypatch.setattr(AutoConfig, "from_pretrained", lambda *args: pytest.fail("built before refused"))
    folder = target(**{name: value})
    with seconds(10), refuses(ValueError, f"{name}={value!r} in {folder}"):
        jb.load(folder)


def test_sizes_that_only_the_model_class_refuses_are_named_too(target):
    folder = target(num_attention_heads=5, head_dim=None)
    with refuses(ValueError, str(folder)):
        jb.load(folder)


def test_sizes_go_by_the_names_of_the_class(tmp_path):
    config = GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=97, n_positions=64)
    GPT2LMHeadModel(config).save_pretrained(tmp_path)
    jb.load(tmp_path)
    path = tmp_path / "config.json"
    for name in ("n_embd", "n_layer"):
        fields = json.loads(path.read_text())
        path.write_text(json.dumps(fields | {name: 10**8}))
        with seconds(10), refuses(ValueError, f"{name}={10**8} in {tmp_path}", "model.safetensors"):
            jb.load(tmp_path)
        path.write_text(json.dumps(fields))


@pytest.mark.parametrize(
    "name", ["/tmp/outside.safetensors", "../outside.safetensors", "a/../../b", "C:\\b", "\\b"]
)
@pytest.mark.parametrize("load", [jb.load, td.DFlashDraftModel.from_pretrained])
def test_an_index_that_leaves_the_checkpoint_is_refused(tmp_path, load, name):
    if load is jb.load:
        make_target("llama").save_pretrained(tmp_path)
    else:
        publish(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "shard.safetensors")
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {}, "weight_map": {"norm.weight": name}}))
    with refuses(ValueError, str(index), "norm.weight", repr(name), "outside"):
        load(tmp_path)


def test_links_of_the_hubs_cache_are_followed(tmp_path):
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshots" / "abc"
    blobs.mkdir()
    snapshot.mkdir(parents=True)
    publish(blobs)
    tensors = load_file(blobs / "model.safetensors")
    (snapshot / "config.json").symlink_to("../../blobs/config.json")
    (snapshot / "model-1.safetensors").symlink_to("../../blobs/model.safetensors")
    index = {"metadata": {}, "weight_map": dict.fromkeys(tensors, "model-1.safetensors")}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(index))
    same_tensors(td.DFlashDraftModel.from_pretrained(snapshot), tensors)


BAD = [(name, value) for name in SIZES for value in (0, -1, "32", True, 32.0)]
BAD += [(name, value) for name in ("hidden_size", "intermediate_size", "head_dim") for value in HUGE]
BAD += [("num_hidden_layers", value) for value in (0, -1, "2", 10**8, 10**12, 3)]
BAD += [("head_dim", 7), ("num_attention_heads", 8), ("num_key_value_heads", 4), ("intermediate_size", 10**6)]
BAD += [("num_key_value_heads", value) for value in (0, -2, "2", True)]
BAD += [("num_target_layers", value) for value in ("x", -4, 2.0)]
BAD += [("rms_norm_eps", value) for value in ("1e-6", None, float("nan"), -1.0, True)]
BAD += [("layer_types", value) for value in (3, "x", [3, 4], [[], []])]
BAD += [("target_layer_ids", 7), ("architectures", 3), ("architectures", "DFlashDraftModel")]
BAD += [
    ("dflash_config", "x"),
    ("dflash_config", [1]),
    ("model_type", 3),
    ("is_causal", "yes"),
    ("is_causal", 1),
]
BAD += [("hidden_act", "nope"), ("dtype", "float8"), ("dtype", 3), ("quantization_config", "x")]
BAD += [("max_position_embeddings", -1)]


@pytest.mark.parametrize(("name", "value"), BAD)
def test_a_drafter_of_bad_fields_is_refused_by_name(tmp_path, name, value):
    nested = (
        {"dflash_config": {"mask_token_id": 96}} if name in ("target_layer_ids", "num_target_layers") else {}
    )
    publish(tmp_path, tensors=tensors_for(PUBLISHED), **(nested | {name: value}))
    with seconds(10), refuses(ValueError, f"{name}={value!r}"):
        td.DFlashDraftModel.from_pretrained(tmp_path)


SCALES = ["input_embedding_scale", "output_multiplier", "final_logit_softcapping"]


@pytest.mark.parametrize("value", ["2", float("nan"), float("inf"), True, [1], -1.0])
@pytest.mark.parametrize("name", SCALES)
def test_scales_are_finite_numbers(tmp_path, name, value):
    publish(tmp_path, dflash_config=FIELDS | {name: value})
    with refuses(ValueError, f"{name}={value!r}"):
        td.DFlashDraftModel.from_pretrained(tmp_path)


@pytest.mark.parametrize("value", [-5, 0, True, "4", 2.5, 2**31])
def test_sliding_layers_have_a_window(tmp_path, value):
    publish(tmp_path, sliding_window=value, layer_types=[SLIDING, FULL])
    with refuses(ValueError, f"sliding_window={value!r}"):
        td.DFlashDraftModel.from_pretrained(tmp_path)
    config = td.DFlashConfig(
        num_hidden_layers=1, layer_types=[SLIDING], sliding_window=4, target_layer_ids=[1]
    )
    config.__dict__["sliding_window"] = value  # past the checks of transformers
    with refuses(ValueError, f"sliding_window={value!r}"):
        config.check()


@pytest.mark.parametrize(
    ("rope", "words"),
    [
        (3, ["rope_parameters"]),
        ([1], ["rope_parameters"]),
        ({"rope_type": 3}, ["rope_type=3"]),
        ({"rope_type": "nope"}, ["rope_parameters", "'nope'", "yarn"]),
        ({"rope_type": "yarn"}, ["rope_parameters", "'factor'", "yarn"]),
        ({"rope_type": "default", "rope_theta": "x"}, ["rope_theta='x'"]),
        ({"rope_type": "default", "rope_theta": float("nan")}, ["rope_theta=nan"]),
        ({"rope_type": "default", "rope_theta": -1.0}, ["rope_theta=-1.0"]),
        ({"rope_type": "linear", "factor": "x"}, ["factor='x'"]),
        ({"rope_type": "linear", "factor": 0}, ["factor=0"]),
        ({"rope_type": "longrope", "factor": 2.0, "short_factor": [1.0]}, ["longrope", "static"]),
    ],
)
def test_rope_parameters_are_what_they_should_be(tmp_path, rope, words):
    publish(tmp_path, rope_parameters=rope, rope_scaling=...)
    with refuses(ValueError, *words):
        td.DFlashDraftModel.from_pretrained(tmp_path)


LONG = {"rope_type": "longrope", "short_factor": [1.0] * 48, "long_factor": [1.0] * 48, "factor": 2.0}


@pytest.mark.parametrize(
    "text",
    [
        Phi3Config(rope_parameters=LONG, original_max_position_embeddings=64),
        LlamaConfig(rope_parameters={"rope_type": "dynamic", "factor": 2.0}),
    ],
    ids=["longrope", "dynamic"],
)
def test_a_rope_inside_of_a_model_of_several_parts_is_seen(text, request):
    config = LlavaConfig(text_config=text)
    with refuses(ValueError, request.node.callspec.id, "static"):
        check_static_rope(config)


def test_a_target_that_projects_its_embedding_takes_no_drafter():
    shape = {"hidden_size": 32, "ffn_dim": 48, "num_attention_heads": 4, "num_hidden_layers": 4}
    shape |= {"vocab_size": 97}
    target = AutoModelForCausalLM.from_config(OPTConfig(**shape, word_embed_proj_dim=16))
    for width in (16, 32):
        config = td.DFlashConfig(
            hidden_size=width, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, head_dim=8,
            num_key_value_heads=2, vocab_size=97, target_layer_ids=[1], mask_token_id=96,
        )  # fmt: skip
        with refuses(ValueError, "hidden_size=32", "16"):
            check_pair(target, td.DFlashDraftModel(config))
