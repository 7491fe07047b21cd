"""Linear weights that stay codes and scales as they are stored: values, products and texts."""

from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from support.quantised import BY_EXPERTS, SMALL, pack, publish, publish_int4, say
from support.refusals import refuses
from support.scripted import run
from transformers import Qwen3Config, Qwen3MoeConfig
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.aot.compile import abstract_pair
from jax_bridge.aot.floor import floor_of
from jax_bridge.checkpoints import load as loading
from jax_bridge.checkpoints.quantised import _unpacked
from jax_bridge.device_memory import bytes_of
from jax_bridge.weights import codes as forms
from jax_bridge.weights import layout
from jax_bridge.weights.codes import (
    FEW_ROWS,
    Blocks,
    Groups,
    Scaled,
    of_codes,
    of_experts,
    of_pairs,
    reading_prompts,
)
from jax_bridge.weights.formats import plain
from jax_bridge.weights.products import linear_jax

PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [3, 1, 4], list(range(1, 30))]
ROOM = {"max_length": 96, "batch_size": 3, "filters": False}


def stored(out, size, block, kind=torch.float8_e4m3fn):
    """Codes [out, size], scales of their blocks, and the values in float64."""
    torch.manual_seed(1)
    rows, columns = -(-out // block[0]), -(-size // block[1])
    wide = torch.randn(out, size) * 60
    codes, scale = (
        wide.round().to(torch.int8) if kind == torch.int8 else wide.to(kind),
        torch.rand(rows, columns) + 0.1,
    )
    spread = scale.repeat_interleave(block[0], 0)[:out].repeat_interleave(block[1], 1)[:, :size]
    return codes, scale, codes.double() * spread.double()


@pytest.mark.parametrize("kind", [torch.float8_e4m3fn, torch.int8])
@pytest.mark.parametrize("block", [(8, 16), (1, 48), (24, 48), (24, 16), (10, 16)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_products_are_those_of_the_values(kind, block, dtype):
    codes, scale, values = stored(24, 48, block, kind)
    kept = of_codes(codes, scale, block, dtype, None)
    assert type(kept) is (Scaled if block[1] == 48 else Blocks) and kept.shape == (24, 48)
    assert kept.array.dtype.itemsize == 1
    got = jb.to_torch(plain(kept))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), values, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=0)
    rows = torch.randn(5, 48).to(dtype)
    wanted, most = rows.double() @ values.T, 2e-6 if dtype == torch.float32 else 5e-3
    product = jb.to_torch(jax.jit(linear_jax)(jb.to_jax(rows), kept))
    assert product.dtype == dtype
    assert (product.double() - wanted).abs().max() < most * wanted.abs().max()


def test_codes_are_those_of_the_file():
    codes, scale, _ = stored(24, 48, (8, 16))
    kept = of_codes(codes, scale, (8, 16), torch.bfloat16, None)
    back = jb.to_torch(kept.array.view(jnp.uint8)).permute(2, 0, 1).reshape(24, 48)
    assert torch.equal(back, codes.view(torch.uint8))
    assert torch.equal(jb.to_torch(kept.scale).T, scale)


WRONG = {
    "turned": lambda scale: scale[::-1],
    "an exponent off by one": lambda scale: scale * 2,
    "one scale for two groups": lambda scale: jnp.repeat(scale[::2], 2, axis=0)[: len(scale)],
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_scale_would_be_seen(wrong):
    codes, scale, values = stored(24, 48, (8, 16))
    kept = of_codes(codes, scale, (8, 16), torch.float32, None)
    broken = replace(kept, scale=WRONG[wrong](kept.scale))
    assert not np.allclose(plain(broken), values.numpy(), rtol=0.05)


def test_an_exponent_is_one():
    codes, _, _ = stored(24, 48, (8, 16))
    bits = torch.randint(120, 134, (3, 3), dtype=torch.uint8)
    kept = of_codes(codes, bits, (8, 16), torch.float32, None)
    assert torch.equal(jb.to_torch(kept.scale).T, 2.0 ** (bits.float() - 127))


def test_a_short_block_of_inputs_is_dequantised():
    codes, scale, _ = stored(24, 40, (8, 16))
    assert of_codes(codes, scale, (8, 16), torch.float32, None) is None


def test_a_row_does_not_depend_on_the_rows_beside_it():
    kept, multiply = (
        of_codes(*stored(24, 48, (8, 16))[:2], (8, 16), torch.bfloat16, None),
        jax.jit(linear_jax),
    )
    many = jb.to_jax(torch.randn(FEW_ROWS + 6, 48).bfloat16())
    whole = multiply(many, kept)
    for count in (1, 2, 3, 16):
        np.testing.assert_array_equal(multiply(many[:count], kept), whole[:count])


def test_only_prompts_change_their_form_with_their_rows(monkeypatch):
    kept = of_codes(*stored(24, 48, (8, 16))[:2], (8, 16), torch.float32, None)
    seen = []
    monkeypatch.setattr(Blocks, "entries", lambda self: seen.append(1) or jnp.zeros(self.shape))
    rows = {count: jnp.ones((count, 48)) for count in (FEW_ROWS, FEW_ROWS + 1)}
    for count in rows:
        linear_jax(rows[count], kept)
    with reading_prompts():
        linear_jax(rows[FEW_ROWS], kept)
        assert not seen
        linear_jax(rows[FEW_ROWS + 1], kept)
    assert seen


def test_only_prompts_change_the_form_of_experts_with_their_rows(monkeypatch):
    kept, seen, entries = of_pairs(*pairs()[:2], torch.float32, None), [], Groups.entries
    monkeypatch.setattr(Groups, "entries", lambda *given: seen.append(1) or entries(*given))
    few, many = (jnp.ones((3, count, 128)) for count in (FEW_ROWS, FEW_ROWS + 1))
    kept.products(few), kept.products(many)
    with reading_prompts():
        kept.products(few)
        assert not seen
        kept.products(many)
    assert seen


# --- experts in MXFP4 ------------------------------------------------------------------------------------


def pairs(experts=3, out=24, groups=4):
    """Codes and exponents as a file has them, and transformers' values of them in float32."""
    torch.manual_seed(1)
    codes = torch.randint(0, 256, (experts, out, groups, 16), dtype=torch.uint8)
    scale = torch.randint(100, 140, (experts, out, groups), dtype=torch.uint8)
    return codes, scale, convert_moe_packed_tensors(codes, scale, dtype=torch.float32)


def test_pairs_keep_their_bits():
    codes, scale, values = pairs()
    kept = of_pairs(codes, scale, torch.bfloat16, None)
    assert (kept.array.dtype, kept.scale.dtype) == (jnp.float4_e2m1fn, jnp.float8_e8m0fnu)
    assert kept.array.shape == (3, 4, 32, 24) and kept.shape == tuple(values.shape)
    bits = np.asarray(kept.array).view(np.uint8).transpose(0, 3, 1, 2)
    np.testing.assert_array_equal(bits[..., ::2] | bits[..., 1::2] << 4, codes)
    np.testing.assert_array_equal(np.asarray(kept.scale).view(np.uint8), scale.permute(0, 2, 1))
    shapes = Groups.shapes(tuple(values.shape), torch.bfloat16)
    alike = zip(jax.tree.leaves(kept), jax.tree.leaves(shapes), strict=True)
    assert all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in alike)
    assert bytes_of(shapes) == codes.nbytes + scale.nbytes  # of a TPU, which packs them


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_pairs_multiply_as_their_values(dtype):
    codes, scale, values = pairs()
    kept = of_pairs(codes, scale, dtype, None)
    np.testing.assert_array_equal(jb.to_torch(plain(kept)).float(), values.to(dtype).float())
    rows = torch.randn(3, 5, 128).to(dtype)
    wanted, most = rows.double() @ values.double(), 2e-6 if dtype == torch.float32 else 5e-3
    multiply = jax.jit(Groups.products)
    for at, own in ((slice(0, 3), kept), (slice(2, 3), kept.one(jnp.array([2])))):
        got = jb.to_torch(multiply(own, jb.to_jax(rows[at])))
        assert got.dtype == dtype and (got.double() - wanted[at]).abs().max() < most * wanted.abs().max()
    with reading_prompts():
        many = torch.randn(3, FEW_ROWS + 1, 128).to(dtype)
        got = jb.to_torch(jax.jit(lambda kept, rows: kept.products(rows))(kept, jb.to_jax(many)))
    wanted = many.double() @ values.double()
    assert (got.double() - wanted).abs().max() < most * wanted.abs().max()


def test_a_row_of_pairs_does_not_depend_on_the_rows_beside_it():
    kept, multiply = of_pairs(*pairs()[:2], torch.bfloat16, None), jax.jit(Groups.products)
    many = jb.to_jax(torch.randn(3, FEW_ROWS + 6, 128).bfloat16())
    whole = multiply(kept, many)
    for count in (1, 2, 3, 16):
        np.testing.assert_array_equal(multiply(kept, many[:, :count]), whole[:, :count])
    for expert in range(3):  # and not on the experts
        alone = multiply(kept.one(jnp.array([expert])), many[expert : expert + 1])
        np.testing.assert_array_equal(alone, whole[expert : expert + 1])


def test_experts_that_are_published_in_mxfp4_decode_as_their_values_do(tmp_path, monkeypatch):
    monkeypatch.setattr(forms, "FEW_ROWS", 8)  # a prompt's chunk is dequantised
    publish("mxfp4", tmp_path)
    loaded, wide = (jb.load(tmp_path, dtype=torch.float32, keep_codes=keep) for keep in (True, False))
    stacks = {name for name, weight in loaded.arrays.items() if isinstance(weight, Groups)}
    assert len(stacks) == 4 and all(name.endswith(("gate_up_proj", "down_proj")) for name in stacks)
    for path in stacks:
        np.testing.assert_array_equal(plain(loaded.arrays[path]), plain(wide.arrays[path]), err_msg=path)
    mixed = {"do_sample": True, "temperature": [0.0, 1.0, 2.0], "top_k": 0, "seed": 3, "max_new_tokens": 30}
    drafting = td.compile(loaded, td.NGramProposer(), **ROOM)
    texts = run(drafting, PROMPTS, **mixed)[0]
    assert texts == run(td.compile(loaded, None, **ROOM), PROMPTS, **mixed)[0]
    assert texts[0] == run(td.compile(wide, None, **ROOM), PROMPTS, **mixed)[0][0]


@pytest.mark.parametrize("name", ["fp8", "fp8_tensor", "fp8_experts"])
def test_a_published_checkpoint_decodes_as_its_values_do(tmp_path, name, monkeypatch):
    monkeypatch.setattr(forms, "FEW_ROWS", 8)  # a prompt's chunk is dequantised
    publish(name, tmp_path)
    loaded, wide = (jb.load(tmp_path, dtype=torch.float32, keep_codes=keep) for keep in (True, False))
    kinds = {type(weight) for weight in loaded.arrays.values()}
    assert {"fp8": Blocks, "fp8_tensor": Scaled, "fp8_experts": Groups}[name] in kinds
    for path, weight in loaded.arrays.items():
        np.testing.assert_allclose(plain(weight), plain(wide.arrays[path]), rtol=1e-6, err_msg=path)
    drafting = td.compile(loaded, td.NGramProposer(), **ROOM)
    texts = run(drafting, PROMPTS, max_new_tokens=30)[0]
    assert texts == run(td.compile(loaded, None, **ROOM), PROMPTS, max_new_tokens=30)[0]
    assert texts == run(td.compile(wide, None, **ROOM), PROMPTS, max_new_tokens=30)[0]


# --- experts in FP8 --------------------------------------------------------------------------------------


@pytest.mark.parametrize("block", [(8, 32), (1, 128), (24, 64)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_in_8_bits_multiply_as_their_values(block, dtype):
    experts = [stored(24, 128, block) for _ in range(3)]
    experts = [(codes, scale + at, values) for at, (codes, scale, values) in enumerate(experts)]
    kept = of_experts([pair[:2] for pair in experts], (3, 24, 128), block, dtype, None, int4=False)
    assert kept.shape == (3, 24, 128) and kept.array.dtype == jnp.float8_e4m3fn
    back = jb.to_torch(kept.array.view(jnp.uint8)).permute(0, 3, 1, 2).reshape(3, 24, 128)
    assert torch.equal(back, torch.stack([codes.view(torch.uint8) for codes, *_ in experts]))
    spread = [scale.repeat_interleave(block[0], 0).repeat_interleave(block[1], 1) for _, scale, _ in experts]
    values = torch.stack(
        [pair[0].double() * scale.double() for pair, scale in zip(experts, spread, strict=True)]
    )
    close = {"rtol": 1e-6 if dtype == torch.float32 else 4e-3, "atol": 0}
    torch.testing.assert_close(jb.to_torch(plain(kept)).double(), values, **close)
    shapes = Groups.shapes(kept.shape, dtype, block=block)
    assert jax.tree.structure(kept) == jax.tree.structure(shapes)
    alike = zip(jax.tree.leaves(kept), jax.tree.leaves(shapes), strict=True)
    assert all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in alike)
    rows, multiply = torch.randn(3, 20, 128).to(dtype), jax.jit(Groups.products)
    wanted, found = rows.double() @ values.mT, multiply(kept, jb.to_jax(rows))
    most = 2e-6 if dtype == torch.float32 else 5e-3
    assert (jb.to_torch(found).double() - wanted).abs().max() < most * wanted.abs().max()
    if dtype == torch.bfloat16:
        np.testing.assert_array_equal(multiply(kept, jb.to_jax(rows[:, :3].contiguous())), found[:, :3])
        alone = multiply(kept.one(jnp.array([2])), jb.to_jax(rows[2:].contiguous()))
        np.testing.assert_array_equal(alone, found[2:])


# --- int4 ------------------------------------------------------------------------------------------------


def packed(experts=3, out=24, size=128, group=32, scales=torch.bfloat16):
    """Words as a file has them, codes, scales of groups, and the values in float64."""
    torch.manual_seed(1)
    codes = torch.randint(-8, 8, (experts, out, size))
    scale = (torch.rand(experts, out, size // group) + 0.1).to(scales)
    words = torch.stack([pack(own) for own in codes])
    return words, codes.to(torch.int8), scale, codes.double() * scale.double().repeat_interleave(group, 2)


def stack_of(words, scale, dtype=torch.bfloat16, group=32):
    experts = [(_unpacked(own), scales) for own, scales in zip(words, scale, strict=True)]
    shape = (len(words), words.shape[1], 8 * words.shape[2])
    return of_experts(iter(experts), shape, (1, group), dtype, None)


def test_int4_keeps_its_codes_and_scales():
    words, codes, scale, values = packed()
    kept = stack_of(words, scale)
    assert kept.shape == tuple(values.shape) and kept.array.shape == (3, 4, 32, 24)
    assert (kept.array.dtype, kept.scale.dtype) == (jnp.int8, jnp.bfloat16)  # a byte on a CPU
    back = jb.to_torch(kept.array).permute(0, 3, 1, 2).reshape(codes.shape)
    assert torch.equal(back, codes) and torch.equal(torch.stack([pack(own) for own in back]), words)
    assert torch.equal(jb.to_torch(kept.scale).permute(0, 2, 1), scale)
    alone = of_codes(codes[0], scale[0], (1, 32), torch.bfloat16, None, int4=True)
    assert type(alone) is Blocks and (alone.array.dtype, alone.scale.dtype) == (jnp.int8, jnp.bfloat16)
    np.testing.assert_array_equal(alone.array, kept.array[0])


def test_off_the_cpu_a_code_takes_4_bits(monkeypatch):
    words, codes, scale, values = packed()
    monkeypatch.setattr(forms, "default_device", lambda: SimpleNamespace(platform="tpu"))
    kept = stack_of(words, scale)
    assert kept.array.dtype == jnp.int4 and bytes_of(kept) == words.nbytes + scale.nbytes
    shapes = Groups.shapes(tuple(values.shape), torch.bfloat16, int4=True)
    assert jax.tree.structure(kept) == jax.tree.structure(shapes)
    alike = zip(jax.tree.leaves(kept), jax.tree.leaves(shapes), strict=True)
    assert all((one.shape, one.dtype) == (other.shape, other.dtype) for one, other in alike)
    back = np.asarray(kept.array).astype(np.int8).transpose(0, 3, 1, 2).reshape(codes.shape)
    np.testing.assert_array_equal(back, codes)
    np.testing.assert_allclose(np.asarray(plain(kept)).astype(np.float64), values, rtol=4e-3)
    by_rows = of_codes(codes[0], scale[0, :, :1], (1, 128), torch.bfloat16, None, int4=True)
    assert type(by_rows) is Scaled and by_rows.array.dtype == jnp.int4


@pytest.mark.parametrize("scales", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_int4_multiplies_as_its_values(scales, group, dtype):
    words, codes, scale, values = packed(group=group, scales=scales)
    kept = stack_of(words, scale, dtype, group)
    got = jb.to_torch(plain(kept))
    assert got.dtype == dtype
    torch.testing.assert_close(got.double(), values, rtol=1e-6 if dtype == torch.float32 else 4e-3, atol=0)
    rows, most = torch.randn(3, 5, 128).to(dtype), 2e-6 if dtype == torch.float32 else 5e-3
    wanted = rows.double() @ values.mT
    multiply = jax.jit(Groups.products)
    for at, own in ((slice(0, 3), kept), (slice(2, 3), kept.one(jnp.array([2])))):
        found = jb.to_torch(multiply(own, jb.to_jax(rows[at])))
        assert found.dtype == dtype
        assert (found.double() - wanted[at]).abs().max() < most * wanted.abs().max()
    with reading_prompts():
        many = torch.randn(3, FEW_ROWS + 1, 128).to(dtype)
        found = jb.to_torch(jax.jit(lambda kept, rows: kept.products(rows))(kept, jb.to_jax(many)))
    whole = many.double() @ values.mT
    assert (found.double() - whole).abs().max() < most * whole.abs().max()
    alone = of_codes(codes[1], scale[1], (1, group), dtype, None, int4=True)
    product = jb.to_torch(jax.jit(linear_jax)(jb.to_jax(rows[1]), alone))
    assert (product.double() - wanted[1]).abs().max() < most * wanted.abs().max()


def test_a_row_of_int4_does_not_depend_on_the_rows_beside_it():
    words, codes, scale, _ = packed()
    kept, multiply = stack_of(words, scale), jax.jit(Groups.products)
    many = jb.to_jax(torch.randn(3, FEW_ROWS + 6, 128).bfloat16())
    whole = multiply(kept, many)
    alone = of_codes(codes[0], scale[0], (1, 32), torch.bfloat16, None, int4=True)
    linear = jax.jit(linear_jax)
    for count in (1, 2, 3, 16):
        np.testing.assert_array_equal(multiply(kept, many[:, :count]), whole[:, :count])
        np.testing.assert_array_equal(linear(many[0, :count], alone), linear(many[0], alone)[:count])
    for expert in range(3):
        only = multiply(kept.one(jnp.array([expert])), many[expert : expert + 1])
        np.testing.assert_array_equal(only, whole[expert : expert + 1])


def test_a_checkpoint_in_int4_decodes_as_its_values_do(tmp_path, monkeypatch):
    monkeypatch.setattr(forms, "FEW_ROWS", 8)  # a prompt's chunk is dequantised
    publish_int4(tmp_path, scales=torch.float32)
    loaded, wide = (jb.load(tmp_path, dtype=torch.float32, keep_codes=keep) for keep in (True, False))
    kinds = {name: type(weight) for name, weight in loaded.arrays.items() if hasattr(weight, "scale")}
    assert [*kinds.values()].count(Groups) == 4
    assert [*kinds.values()].count(Blocks) == len(kinds) - 4 == 8
    for path, weight in loaded.arrays.items():
        np.testing.assert_allclose(plain(weight), plain(wide.arrays[path]), rtol=1e-6, err_msg=path)
    mixed = {"do_sample": True, "temperature": [0.0, 1.0, 2.0], "top_k": 0, "seed": 3, "max_new_tokens": 30}
    drafting = td.compile(loaded, td.NGramProposer(), **ROOM)
    texts = run(drafting, PROMPTS, **mixed)[0]
    assert texts == run(td.compile(loaded, None, **ROOM), PROMPTS, **mixed)[0]
    assert texts[0] == run(td.compile(wide, None, **ROOM), PROMPTS, **mixed)[0][0]


def test_experts_of_other_groups_are_dequantised(tmp_path):
    """Experts whose scales differ in type have no stack of codes."""
    publish_int4(tmp_path, ".experts.", size=32)
    state = load_file(tmp_path / "model.safetensors")
    name = "model.layers.0.mlp.experts.2.down_proj.weight_scale"
    save_file(state | {name: state[name].float()}, tmp_path / "model.safetensors", {"format": "pt"})
    arrays = jb.load(tmp_path, keep_codes=True).arrays
    found = {path for path, weight in arrays.items() if isinstance(weight, Groups)}
    assert len(found) == 3 and "model.layers.0.mlp.experts.down_proj" not in found


def test_experts_in_int4_count_as_codes_and_scales_where_no_chip_is():
    config = Qwen3MoeConfig(**BY_EXPERTS)
    sizes = {"capacity": 64}
    whole, own = (abstract_pair(config, None, quantize=form, **sizes) for form in (None, "int4"))
    stacks = {name for name, kept in own.params.items() if isinstance(kept, Groups)}
    assert len(stacks) == 4
    for name in stacks:
        assert own.params[name].shape == whole.params[name].shape
        assert bytes_of(own.params[name]) == 0.28125 * bytes_of(whole.params[name])  # 4 bits and 16 for 32
    assert floor_of(own.pair, own.params, 8).verify < floor_of(whole.pair, whole.params, 8).verify
    with refuses(ValueError, "quantize='int4'", "[experts, out, in]"):
        abstract_pair(Qwen3Config(**SMALL), None, quantize="int4", **sizes)


def test_both_options_go_together_and_others_are_refused(tmp_path, monkeypatch):
    publish("fp8", tmp_path)
    monkeypatch.setitem(layout.ARITHMETIC, "cpu", layout.ARITHMETIC["tpu"])
    loaded = jb.load(tmp_path, keep_codes=True, quantize="int8")
    codes = {weight.array.dtype.name for weight in loaded.arrays.values() if hasattr(weight, "scale")}
    assert codes == {"float8_e4m3fn", "int8"}  # the file's, and the head's
    with refuses(ValueError, "keep_codes='yes'", "True or False"):
        jb.load(tmp_path, keep_codes="yes")
    monkeypatch.undo()
    monkeypatch.setattr(loading, "devices_of", lambda mesh: jax.devices() * 2)
    with refuses(ValueError, "quantize='int8'", "with a mesh"):  # of CPUs
        jb.load(tmp_path, mesh=2, quantize="int8")
    monkeypatch.undo()
    say(tmp_path, quantization_config={"quant_method": "gptq"})
    with refuses(ValueError, "gptq"):
        jb.load(tmp_path, keep_codes=True)
