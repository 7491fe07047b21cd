"""Quantised checkpoints in published fields: arrays are transformers' own dequantised weights, bit by bit."""

import json
import weakref

import pytest
import torch
import transformers as hf
from packaging.version import Version
from safetensors.torch import load_file, save_file
from support.quantised import KINDS, PACKED, SMALL, packed, publish, publish_int4, say
from support.refusals import refuses
from support.taps import build
from transformers.quantizers import auto

import jax_bridge as jb
from jax_bridge.checkpoints import experts, quantised
from jax_bridge.checkpoints.method import method_of
from jax_bridge.checkpoints.quantised import Dequantised
from jax_bridge.weights.formats import unwrap
from torch_dflash.storage.weight_files import read_checkpoint


@pytest.fixture(scope="module")
def published(tmp_path_factory):
    return {name: publish(name, tmp_path_factory.mktemp(name)) for name in KINDS}


def differing(folder, dtype, **asked):
    arrays = unwrap(jb.load(folder, dtype=dtype).arrays)
    given = {} if dtype is None else {"dtype": dtype}
    theirs = hf.AutoModelForCausalLM.from_pretrained(folder, **given, **asked)
    wanted = dict(theirs.named_parameters()) | dict(theirs.named_buffers())
    # Versions before 5.24 left a few weights in their own type.
    if dtype is not None and Version(hf.__version__) < Version("5.24"):
        wanted = {name: each.to(dtype) if each.is_floating_point() else each for name, each in wanted.items()}
    assert arrays.keys() == wanted.keys()
    found = {name: jb.to_torch(arrays[name]) for name in wanted}
    same = lambda a, b: a.dtype == b.dtype and torch.equal(a, b)  # noqa: E731
    return [name for name, tensor in wanted.items() if not same(found[name], tensor)]


@pytest.mark.parametrize("name", KINDS)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_arrays_are_transformers_own_dequantised_weights(published, name, dtype):
    assert differing(published[name], dtype) == []


def wrong_axis(codes, scales, dtype):
    return quantised.Fp8Dequantize(None)._dequantize_one(
        codes.float(), scales.T.contiguous() if scales.ndim == 2 else scales, output_dtype=dtype
    )


def test_a_scale_of_the_wrong_axis_is_seen(published, monkeypatch):
    monkeypatch.setattr(quantised, "_scaled", wrong_axis)
    found = differing(published["fp8_experts"], None)  # square weights: shapes alone do not show it
    assert any("self_attn" in name or "experts" in name for name in found)


def test_halves_of_an_expert_that_are_swapped_are_seen(published, monkeypatch):
    monkeypatch.setitem(experts._PARTS, "gate_up_proj", (("w3", "w1"),))
    assert [name for name in differing(published["fp8_experts"], None) if name.endswith("gate_up_proj")]


def weights_of(folder):
    method = method_of(json.loads((folder / "config.json").read_text()), folder)
    return quantised.dequantised(read_checkpoint(str(folder)), method, torch.float32)


@pytest.mark.parametrize("name", KINDS)
def test_a_part_is_that_of_the_whole(published, name):
    """Devices of a mesh read parts with edges inside of a block."""
    parts = [part for part in weights_of(published[name]).values() if isinstance(part, Dequantised)]
    assert len(parts) > 3
    for part in parts[:4]:
        whole = part.read()
        assert whole.shape == part.shape
        every = slice(None)
        for index in ((slice(1, 2),), (slice(0, 3), slice(5, 40)), (every, slice(17, 18), slice(3, 60))):
            index = index[: len(part.shape)]
            assert torch.equal(part.read_part(index), whole[index]), (part.name, index)


def test_no_more_than_two_tensors_are_in_memory(published, monkeypatch):
    alive, most, read = weakref.WeakSet(), [], Dequantised.read

    def counted(part):
        value = read(part)
        alive.add(value)
        most.append(len(alive))
        return value

    monkeypatch.setattr(Dequantised, "read", counted)
    jb.load(published["fp8_experts"])
    assert len(most) > 20 and max(most) <= 2


COMPRESSED = {
    "channel": {"type": "float", "num_bits": 8, "strategy": "channel", "symmetric": True},
    "int8": {"type": "int", "num_bits": 8, "strategy": "channel", "symmetric": True},
}


def compressed(folder, name, **changes):
    """A tiny Qwen3 as compressed-tensors writes it: a scale in bfloat16 for each output row."""
    kind, config, fields = KINDS["fp8"]
    torch.manual_seed(0)
    kind(config(**fields)).to(torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for tensor, value in [item for item in state.items() if "proj" in item[0]]:
        state[tensor + "_scale"] = (torch.rand(len(value), 1) + 0.1).to(torch.bfloat16)
        codes = torch.randn(value.shape) * 50
        state[tensor] = codes.clamp(-127, 127).to(torch.int8 if name == "int8" else torch.float8_e4m3fn)
    save_file(state, folder / "model.safetensors")
    form = "int-quantized" if name == "int8" else "float-quantized"
    group = {"weights": COMPRESSED[name], "targets": ["Linear"], "input_activations": None}
    say(folder, quantization_config={
        "quant_method": "compressed-tensors", "format": form, "config_groups": {"group_0": group},
        "ignore": ["lm_head"], "quantization_status": "compressed",
    } | changes)  # fmt: skip
    return folder


@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_compressed_tensors_multiply_in_the_type_of_their_scales(tmp_path, name, dtype):
    arrays = unwrap(jb.load(compressed(tmp_path, name), dtype=dtype).arrays)
    state = load_file(tmp_path / "model.safetensors")
    for tensor in [one for one in state if one.endswith("proj.weight")]:
        scale = state[tensor + "_scale"]
        assert torch.equal(jb.to_torch(arrays[tensor]), (state[tensor].to(scale.dtype) * scale).to(dtype)), (
            tensor
        )


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("name", COMPRESSED)
@pytest.mark.parametrize("dtype", [None, torch.float32])
def test_compressed_tensors_are_transformers_own(tmp_path, name, dtype):
    pytest.importorskip("compressed_tensors")
    asked = hf.CompressedTensorsConfig(dequantize=True)
    assert differing(compressed(tmp_path, name), dtype, quantization_config=asked) == []


@pytest.mark.parametrize(
    "method", sorted(set(auto.AUTO_QUANTIZER_MAPPING) - {"mxfp4", "fp8", "compressed-tensors"})
)
def test_another_method_is_refused_by_name(published, tmp_path, method):
    compressed(tmp_path, "int8", quant_method=method)
    with refuses(ValueError, f"quant_method={method!r}", "mxfp4, fp8, compressed-tensors", "from_pretrained"):
        jb.load(tmp_path)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"format": "marlin-24"}, ["format='marlin-24'", "float-quantized"]),
        ({"format": "pack-quantized"}, ["num_bits=8", "4 is read"]),
        ({"format": "nvfp4-pack-quantized"}, ["format='nvfp4-pack-quantized'"]),
        ({"config_groups": {"group_0": {"weights": COMPRESSED["int8"] | {"num_bits": 4}}}}, ["num_bits=4"]),
        (
            {"config_groups": {"group_0": {"weights": COMPRESSED["int8"] | {"symmetric": False}}}},
            ["symmetric=False"],
        ),
        ({"transform_config": {"config_groups": {}}}, ["transform_config"]),
        ({"sparsity_config": "dense"}, ["sparsity_config='dense'", "must be an object"]),
        ({"config_groups": None}, ["config_groups=None", "must be an object"]),
        ({"config_groups": {"W8A8": ["Linear"]}}, ["config_groups['W8A8']=['Linear']"]),
        ({"config_groups": {"group_0": {"weights": None}}}, ["weights of config_groups['group_0']=None"]),
        (
            {"config_groups": {"group_0": {"weights": COMPRESSED["int8"] | {"strategy": "token"}}}},
            ["strategy='token'", "channel"],
        ),
        (
            {"config_groups": {"group_0": {"weights": COMPRESSED["int8"] | {"strategy": "block"}}}},
            ["block_structure=None"],
        ),
        ({"quant_method": ["fp8"]}, ["quant_method=['fp8']"]),
        ({"quant_method": "fp8", "weight_block_size": 128}, ["weight_block_size=128"]),
    ],
)
def test_forms_of_compressed_tensors_that_are_not_read_are_named(tmp_path, changes, words):
    with refuses(ValueError, *words):
        jb.load(compressed(tmp_path, "int8", **changes))


Q = "model.layers.0.self_attn.q_proj.weight"
DOWN = "model.layers.0.mlp.experts.down_proj"


@pytest.mark.parametrize(
    ("kind", "change", "words"),
    [
        ("fp8", {Q + "_scale_inv": torch.ones(3, 4)}, ["(3, 4)", "a block of the same size"]),
        ("fp8", {Q + "_scale_inv": torch.ones(2, 2)}, ["(2, 2)", "((16, 16),)"]),
        ("fp8", {Q + "_scale_inv": None}, [f"{Q} is stored as torch.float8_e4m3fn without a scale"]),
        ("fp8", {Q: torch.ones(64, 64)}, [f"{Q} is stored as torch.float32", "float8_e4m3fn"]),
        ("fp8", {Q + "_scale": torch.ones(4, 4)}, [f"are both scales of {Q}"]),
        ("mxfp4", {DOWN + "_scales": torch.ones(4, 64, 2)}, [f"{DOWN}_scales is stored as torch.float32"]),
        ("int8", {Q + "_scale": None}, [f"{Q} is stored as torch.int8 without a scale"]),
        ("int8", {Q + "_scale": torch.ones(64, 1).byte()}, [f"{Q}_scale is stored as torch.uint8"]),
        ("int8", {Q + "_scale": torch.ones(1, 64)}, ["(1, 64)", "((1, None),)"]),
    ],
)
def test_codes_and_scales_that_do_not_fit_are_named(tmp_path, kind, change, words):
    folder = compressed(tmp_path, kind) if kind == "int8" else publish(kind, tmp_path)
    changed = load_file(folder / "model.safetensors") | change
    save_file(
        {key: value for key, value in changed.items() if value is not None}, folder / "model.safetensors"
    )
    with refuses(ValueError, *words):
        jb.load(folder)


def test_codes_without_a_quantization_config_are_named(tmp_path):
    folder = compressed(tmp_path, "int8")
    say(folder, quantization_config=None)
    with refuses(ValueError, "torch.int8", "quantization_config of config.json"):
        jb.load(folder)
    say(publish_int4(tmp_path), quantization_config=None)
    with refuses(ValueError, "weight_packed is stored as torch.int32", "quantization_config of config.json"):
        jb.load(tmp_path)


@pytest.mark.parametrize("name", ["fp8", "fp8_experts"])
def test_a_last_block_may_be_short_in_rows_and_columns(tmp_path, name):
    """64 rows and columns in blocks of 48: 48 and 16; transformers takes 32 each, by the number of blocks."""
    folder = publish(name, tmp_path, block=48)
    state, parts = load_file(folder / "model.safetensors"), weights_of(folder)
    pairs = {tensor: part for tensor, part in parts.items() if isinstance(part, Dequantised)}
    assert any(state[tensor + "_scale_inv"].shape == (2, 2) for tensor in pairs)
    for tensor, part in pairs.items():
        scales = state[tensor + "_scale_inv"].repeat_interleave(48, 0).repeat_interleave(48, 1)
        rows, columns = state[tensor].shape
        wanted = state[tensor].float() * scales[:rows, :columns]
        assert torch.equal(part.read(), wanted), tensor
        last, late = slice(62, 64), (slice(40, 50), slice(47, 49))
        for index in (late, (slice(48, 64),), (slice(0, 8), slice(60, 64)), (last, last)):
            if wanted[index].numel():  # some have 32 rows
                assert torch.equal(part.read_part(index), wanted[index]), (tensor, index)
    jb.load(folder)


def test_two_blocks_of_the_config_that_fit_the_same_scales_are_not_guessed(tmp_path):
    def group(size):
        return {"weights": COMPRESSED["int8"] | {"strategy": "group", "group_size": size}}

    folder = compressed(tmp_path, "int8", config_groups={"a": group(40), "b": group(48)})
    state = load_file(folder / "model.safetensors")
    scales = {name: torch.ones(len(value), 2) for name, value in state.items() if name.endswith("_scale")}
    save_file(state | scales, folder / "model.safetensors")
    with refuses(ValueError, "(64, 2)", "((1, 40), (1, 48))"):
        jb.load(folder)


def test_what_transformers_cuts_in_other_blocks_is_not_sent_there(tmp_path):
    folder = publish("fp8", tmp_path)
    say(folder, quantization_config={"quant_method": "fp8", "weight_block_size": [60, 60]})
    with refuses(ValueError, "(4, 4)", "((60, 60),)", "fetch config.json and weights again") as error:
        jb.load(folder)
    assert "from_pretrained" not in str(error.value)


STALE = [{"quant_method": "bitsandbytes", "load_in_4bit": True}, {"quant_method": "gptq", "bits": 4}]
STALE += [{"quant_method": "awq", "bits": 4}, {"quant_method": "mxfp4"}]
STALE += [{"quant_method": "fp8", "weight_block_size": 128}]
STALE += [{"quant_method": "compressed-tensors", "format": "pack-quantized"}, {"quant_method": None}, {}]


@pytest.mark.parametrize("fields", STALE)
def test_plain_weights_are_plain_whatever_quantization_config_says(tmp_path, fields):
    torch.manual_seed(0)
    model = hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL))
    model.save_pretrained(tmp_path)
    say(tmp_path, quantization_config=fields)
    arrays = unwrap(jb.load(tmp_path).arrays)
    assert all(torch.equal(jb.to_torch(arrays[name]), value) for name, value in model.named_parameters())


@pytest.mark.parametrize(
    "fields", [{"quant_method": "bitnet"}, STALE[5] | {"config_groups": {}, "transform_config": {"R1": {}}}]
)
def test_a_method_that_computes_on_plain_weights_is_refused(tmp_path, fields):
    hf.Qwen3ForCausalLM(hf.Qwen3Config(**SMALL)).save_pretrained(tmp_path)
    say(tmp_path, quantization_config=fields)
    with refuses(ValueError, fields["quant_method"], "from_pretrained"):
        jb.load(tmp_path)


def test_zero_points_of_zero_and_those_of_inputs_change_nothing(tmp_path):
    folder = compressed(tmp_path, "int8")
    wanted, state = unwrap(jb.load(folder).arrays), load_file(tmp_path / "model.safetensors")
    stem = Q.removesuffix("weight")
    more = {stem + "input_scale": torch.ones(1), stem + "input_zero_point": torch.tensor([3]).to(torch.int8)}
    zeros = {Q + "_zero_point": torch.zeros(64, 1, dtype=torch.int8)}
    save_file(state | more | zeros, tmp_path / "model.safetensors")
    arrays = unwrap(jb.load(folder).arrays)
    assert arrays.keys() == wanted.keys()
    assert all(torch.equal(jb.to_torch(arrays[name]), jb.to_torch(wanted[name])) for name in wanted)
    zeros[Q + "_zero_point"][7] = 1
    save_file(state | more | zeros, tmp_path / "model.safetensors")
    with refuses(ValueError, f"{Q}_zero_point", "others than 0", "from_pretrained"):
        jb.load(folder)


# --- packed int4 -----------------------------------------------------------------------------------------


def defined(state, name):
    """Values of packed int4: the first code in the lowest bits, 8 less each, products in the scales' type."""
    words, scale = state[name + "_packed"], state[name + "_scale"]
    codes = torch.stack([(words >> 4 * at & 15) - 8 for at in range(8)], dim=-1).flatten(1)
    assert codes.shape == tuple(state[name + "_shape"].tolist())
    return codes.to(scale.dtype) * scale.repeat_interleave(codes.shape[1] // scale.shape[1], 1)


def stack_of(state, prefix, *parts):
    every = range(sum(name.startswith(prefix) and f"{parts[0]}.weight_packed" in name for name in state))
    one = lambda at: torch.cat([defined(state, f"{prefix}{at}.{part}.weight") for part in parts])  # noqa: E731
    return torch.stack([one(at) for at in every])


@pytest.mark.parametrize("size, scales", [(32, torch.bfloat16), (16, torch.float32), (None, torch.bfloat16)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_int4_has_its_defined_values(tmp_path, size, scales, dtype):
    arrays = unwrap(jb.load(publish_int4(tmp_path, size=size, scales=scales), dtype=dtype).arrays)
    state = load_file(tmp_path / "model.safetensors")
    names = [name[:-7] for name in state if name.endswith("_packed") and ".experts." not in name]
    assert len(names) == 8
    wanted = {name: defined(state, name) for name in names}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts."
        wanted[prefix + "gate_up_proj"] = stack_of(state, prefix, "gate_proj", "up_proj")
        wanted[prefix + "down_proj"] = stack_of(state, prefix, "down_proj")
    for name, values in wanted.items():
        assert torch.equal(jb.to_torch(arrays[name]), values.to(dtype)), name


@pytest.mark.filterwarnings("ignore:You passed `quantization_config`")
@pytest.mark.parametrize("size", [32, None])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_packed_int4_is_transformers_own(tmp_path, size, dtype):
    pytest.importorskip("compressed_tensors")
    arrays = unwrap(jb.load(publish_int4(tmp_path, size=size), dtype=dtype).arrays)
    asked = hf.CompressedTensorsConfig(dequantize=True)
    theirs = hf.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=dtype, quantization_config=asked)
    for name, value in theirs.named_parameters():  # experts stay in their scales' type
        assert torch.equal(jb.to_torch(arrays[name]), value.to(dtype)), name


def test_a_part_of_packed_int4_is_that_of_the_whole(tmp_path):
    parts = [part for part in weights_of(publish_int4(tmp_path)).values() if isinstance(part, Dequantised)]
    assert len(parts) == 32
    for part in parts[::5]:
        whole = part.read()
        for index in ((slice(1, 2),), (slice(0, 3), slice(5, 40)), (slice(None), slice(33, 62))):
            assert torch.equal(part.read_part(index), whole[index]), (part.name, index)


def published_name(name):
    """A weight's name in Kimi-K2.5's files; transformers saves three otherwise."""
    for own, other in (("model.blocks.", "model.layers."), ("model.mm_", "mm_"), ("encoder.patch", "patch")):
        name = name.replace(own, other)
    return name


def test_kimi_loads_as_it_is_published(tmp_path):
    """Routed experts in int4, one by one, the rest in bfloat16; the tower's wqkv; a wrapper's fields."""
    target = build("kimi_k25").bfloat16()
    target.save_pretrained(tmp_path)
    file = tmp_path / "model.safetensors"
    plain = {published_name(name): weight for name, weight in load_file(file).items()}
    assert any("vision_tower.encoder.blocks.0.wqkv" in name for name in plain)
    save_file(plain, file, {"format": "pt"})
    packed(tmp_path, ".mlp.experts.", size=16)
    fields = json.loads((tmp_path / "config.json").read_text())
    fields["text_config"] |= {"model_type": "kimi_k2", "quantization_config": fields["quantization_config"]}
    say(tmp_path, text_config=fields["text_config"], quantization_config=None)
    state = load_file(file)
    prefix, own = "language_model.model.layers.1.mlp.experts.", "model.language_model.layers.1.mlp.experts."
    assert prefix + "3.up_proj.weight_packed" in state
    for keep_codes in (False, True):
        arrays = unwrap(jb.load(tmp_path, keep_codes=keep_codes, progress=False).arrays)
        same = {name for name, weight in target.named_parameters() if ".mlp.experts." not in name}
        assert all(torch.equal(jb.to_torch(arrays[name]), target.get_parameter(name)) for name in same)
        for name, parts in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
            assert torch.equal(jb.to_torch(arrays[own + name]), stack_of(state, prefix, *parts)), name


def test_a_fused_weight_that_the_heads_do_not_divide_is_refused(tmp_path):
    build("kimi_k25").save_pretrained(tmp_path)
    fields = json.loads((tmp_path / "config.json").read_text())
    say(tmp_path, vision_config=fields["vision_config"] | {"num_attention_heads": 5})
    with refuses(ValueError, "attn.q_proj.weight", "is missing"):
        jb.load(tmp_path, progress=False)


PACKED_Q = Q + "_packed"


@pytest.mark.parametrize(
    ("weights", "group", "words"),
    [
        ({"num_bits": 8}, {}, ["num_bits=8", "4 is read"]),
        ({"symmetric": False}, {}, ["symmetric=False"]),
        ({"type": "float"}, {}, ["type='float'", "int is read"]),
        ({"actorder": "group"}, {}, ["actorder='group'"]),
        ({}, {"input_activations": {"num_bits": 8, "type": "int"}}, ["input_activations={'num_bits': 8"]),
        ({}, {"output_activations": {"num_bits": 8}}, ["output_activations={'num_bits': 8}"]),
    ],
)
def test_forms_of_packed_weights_that_are_not_read_are_named(tmp_path, weights, group, words):
    groups = {"g": {"weights": PACKED | weights, "targets": ["Linear"], "input_activations": None} | group}
    with refuses(ValueError, *words, "from_pretrained"):
        jb.load(publish_int4(tmp_path, config_groups=groups))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({Q + "_shape": torch.tensor([64, 61])}, ["(64, 61)", "(64, 64)", "whole integers of 8 codes"]),
        ({Q + "_g_idx": torch.zeros(64, dtype=torch.int32)}, [f"{Q}_g_idx", "actorder"]),
        ({Q + "_zero_point": torch.ones(8, 2, dtype=torch.int32)}, [f"{Q}_zero_point", "others than 0"]),
        ({PACKED_Q: torch.ones(64, 8)}, [f"{PACKED_Q} is stored as torch.float32", "torch.int32"]),
        ({PACKED_Q: torch.ones(8, dtype=torch.int32)}, ["of shape (8,)", "[out, in / 8]"]),
        ({Q + "_scale": torch.ones(64, 3)}, ["(64, 3)", "((1, 32),)"]),
        ({Q + "_scale": None}, [f"{PACKED_Q} is stored as torch.int32 without a scale"]),
    ],
)
def test_packed_codes_that_do_not_fit_are_named(tmp_path, change, words):
    state = load_file(publish_int4(tmp_path) / "model.safetensors") | change
    state = {name: value for name, value in state.items() if value is not None}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    with refuses(ValueError, *words):
        jb.load(tmp_path)


def test_a_shape_beside_packed_codes_may_be_left_out(tmp_path):
    state = load_file(publish_int4(tmp_path) / "model.safetensors")
    wanted = unwrap(jb.load(tmp_path).arrays)
    state = {name: value for name, value in state.items() if not name.endswith("_shape")}
    save_file(state, tmp_path / "model.safetensors", {"format": "pt"})
    arrays = unwrap(jb.load(tmp_path).arrays)
    assert all(torch.equal(jb.to_torch(arrays[name]), jb.to_torch(wanted[name])) for name in wanted)
