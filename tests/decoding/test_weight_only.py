"""`quantize="int8"` off the CPU: codes and a scale for each output row, rows as they are.

No chip is here, so that the CPU takes the form of a TPU for the time of a test.
"""

import copy

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from support.families import MORE
from support.hybrids import make_hybrid
from support.refusals import refuses
from support.scripted import own_text, run
from support.tiny import BASE, make_drafter, make_target, randomise, small_pair
from torch import nn

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.weights import layout
from jax_bridge.weights.codes import Scaled
from jax_bridge.weights.formats import bound, plain
from jax_bridge.weights.products import linear_jax

PROMPTS = [[5, 17, 80, 33, 2, 9, 41], [3, 1, 4], list(range(1, 30))]
ROOM = {"max_length": 96, "batch_size": 3, "filters": False}


@pytest.fixture(autouse=True)
def as_on_a_tpu(monkeypatch):
    monkeypatch.setitem(layout.ARITHMETIC, "cpu", layout.ARITHMETIC["tpu"])


def codes_and_scale(weight):
    """The definition: the largest entry of each row is 127 steps."""
    scale = weight.double().abs().amax(dim=1) / 127
    scale = torch.where(scale > 0, scale, 1 / 127)
    return (weight.double() / scale[:, None]).round(), scale


def dequantised(target):
    """A copy of ``target`` whose linear weights, a tied head's among them, have the values of the form."""
    found = copy.deepcopy(target)
    for name, part in found.named_modules():
        if isinstance(part, nn.Linear) and name != "lm_head":
            codes, scale = codes_and_scale(part.weight)
            part.weight.data = (codes * scale[:, None]).to(part.weight.dtype)
    codes, scale = codes_and_scale(target.lm_head.weight)
    found.lm_head.weight.data = (codes * scale[:, None]).to(target.dtype)
    found.tie_weights()
    return found


@pytest.mark.parametrize("dtype, bound_of", [(torch.float32, 1e-6), (torch.bfloat16, 5e-3)])
def test_a_product_scales_its_sums(dtype, bound_of):
    torch.manual_seed(0)
    rows, weight = torch.randn(3, 40).to(dtype), (torch.randn(24, 40) * torch.rand(24, 1)).to(dtype)
    weight[7] = 0
    kept = Scaled.of(weight, None)
    codes, scale = codes_and_scale(weight)
    assert torch.equal(jb.to_torch(kept.array).double(), codes) and kept.array.dtype == jnp.int8
    assert (kept.shape, kept.dtype) == ((24, 40), str(dtype)[6:])
    wanted = (rows.double() @ codes.T) * scale
    got = jb.to_torch(jax.jit(linear_jax)(jb.to_jax(rows), kept))
    assert got.dtype == dtype  # and never the codes'
    error = (got.double() - wanted).abs().max() / wanted.abs().max()
    assert error < bound_of
    by_columns = (rows.double() * scale.repeat(2)[:40]) @ codes.T
    assert (by_columns - wanted).abs().max() / wanted.abs().max() > 100 * bound_of


def test_a_row_does_not_depend_on_the_rows_beside_it():
    kept, multiply = Scaled.of(torch.randn(24, 40), None), jax.jit(linear_jax)
    for dtype in torch.float32, torch.bfloat16:
        for three in jb.to_jax(torch.randn(20, 3, 40).to(dtype)):
            alone = [multiply(three[row : row + 1], kept) for row in range(3)]
            np.testing.assert_array_equal(multiply(three, kept), jnp.concatenate(alone))


@pytest.mark.parametrize("family", ["llama", "qwen3"])  # qwen3's embedding is its head
@pytest.mark.parametrize("cache", ["static", "paged"])
def test_the_text_is_that_of_the_dequantised_target(family, cache):
    target, drafter = small_pair(family, agree=6.0)
    texts, stats = run(
        td.compile(target, drafter, quantize="int8", cache=cache, **ROOM), PROMPTS, max_new_tokens=40
    )
    own = dequantised(target)
    assert texts == [own_text(own, prompt, 40) for prompt in PROMPTS]
    assert texts != [own_text(target, prompt, 40) for prompt in PROMPTS]
    assert stats.mean_acceptance_length > 1.2


def pair_of(family):
    if family == "qwen3_5":
        return make_hybrid(family), td.NGramProposer()
    if family == "qwen3_moe":
        target = randomise(MORE[family][0](MORE[family][1](**BASE | MORE[family][2])).eval(), 0)
        return target, make_drafter(target)
    return small_pair(family, agree=6.0)


@pytest.mark.parametrize("family", ["qwen3_moe", "gpt_oss", "qwen3", "qwen3_5"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_drafting_says_what_plain_decoding_says(family, dtype):
    target, drafter = pair_of(family)
    target, drafter = target.to(dtype), drafter.to(dtype) if isinstance(drafter, nn.Module) else drafter
    engines = [td.compile(target, one, quantize="int8", **ROOM) for one in (drafter, None)]
    assert run(engines[0], PROMPTS, max_new_tokens=30)[0] == run(engines[1], PROMPTS, max_new_tokens=30)[0]
    sampled = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.8, "top_k": 0, "seed": 3}
    assert run(engines[0], PROMPTS, **sampled)[0] == run(engines[1], PROMPTS, **sampled)[0]


def test_a_tied_table_is_codes_alone_and_its_rows_are_read():
    target = make_target("qwen3", num_hidden_layers=2).bfloat16()
    engine = td.compile(target, None, quantize="int8", **ROOM)
    name = "target.model.model.embed_tokens.weight"
    kept = engine.runtime.refresh(engine.tensors())[name]
    assert isinstance(kept, Scaled) and kept.table is None and len(jax.tree.leaves(kept)) == 2
    codes, scale = codes_and_scale(target.lm_head.weight)
    values = (codes * scale[:, None]).bfloat16()
    ids = jnp.array([3, 0, 3, 71])
    assert torch.equal(jb.to_torch(kept.look_up(ids)), values[[3, 0, 3, 71]])
    assert torch.equal(jb.to_torch(plain(kept)), values)
    with bound({name: kept}) as arrays:
        assert arrays[name].dtype == jnp.bfloat16  # what the model sees


def test_an_untied_embedding_stays_as_it_is():
    target = make_target("llama", num_hidden_layers=2)
    engine = td.compile(target, None, quantize="int8", **ROOM)
    params = engine.runtime.refresh(engine.tensors())
    assert not isinstance(params["target.model.model.embed_tokens.weight"], Scaled)
    assert isinstance(params["target.model.lm_head.weight"], Scaled)


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_a_loaded_checkpoint_is_quantised_as_it_is_read(tmp_path, family):
    target, drafter = small_pair(family, agree=6.0)
    target.save_pretrained(tmp_path)
    loaded = jb.load(tmp_path, quantize="int8")
    engine = td.compile(target, drafter, quantize="int8", **ROOM)
    params = engine.runtime.refresh(engine.tensors())
    for name, kept in loaded.arrays.items():
        own = params[f"target.model.{name}"]
        assert type(kept) is type(own), name
        jax.tree.map(np.testing.assert_array_equal, kept, own)
    texts = run(engine, PROMPTS, max_new_tokens=20)[0]
    again = td.compile(loaded, drafter, **ROOM)  # the target tells
    assert again.options.quantize == "int8" and again.runtime.fewest_rows == engine.runtime.fewest_rows
    assert run(again, PROMPTS, max_new_tokens=20)[0] == texts
    with refuses(ValueError, "compute='bfloat16'", "jb.load"):
        td.compile(loaded, drafter, compute="bfloat16", **ROOM)
    as_it_is = jb.load(tmp_path)
    with refuses(ValueError, "quantize='int8'", "jb.load(..., quantize='int8')"):
        td.compile(as_it_is, drafter, quantize="int8", **ROOM)
    with refuses(ValueError, "quantize='int4'"):
        jb.load(tmp_path, quantize="int4")


def test_a_drafter_alone_in_8_bits_changes_no_text():
    target, drafter = small_pair("llama", agree=6.0)
    engine = td.compile(target, drafter, drafter_quantize="int8", **ROOM)
    params = engine.runtime.refresh(engine.tensors())
    kept = {name for name, leaf in params.items() if isinstance(leaf, Scaled)}
    assert kept and all(name.startswith("proposer.") for name in kept)
    texts, stats = run(engine, PROMPTS, max_new_tokens=40)
    assert texts == [own_text(target, prompt, 40) for prompt in PROMPTS]
    assert stats.mean_acceptance_length > 1.2
    with refuses(ValueError, "drafter_quantize='int8'", "runtime='eager'"):
        td.compile(target, drafter, drafter_quantize="int8", runtime="eager", max_length=96)
    with refuses(ValueError, "drafter_quantize='int4'"):
        td.compile(target, drafter, drafter_quantize="int4", max_length=96)
