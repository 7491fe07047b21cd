"""The decoding round as a TPU program: exported in every run, compiled with the TPU compiler under `aot`."""

from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from models import BASE as TINY
from models import FAMILIES, MASK
from transformers import Qwen3Config

import torch_dflash as td
from jax_bridge import aot
from jax_bridge.hlo import Program, read_aliases
from jax_bridge.state import register_states
from torch_dflash.proposers import NGramProposer

# Nothing of a round needs a custom call; host callbacks would be ones.
FORBIDDEN = {
    "custom call": r"stablehlo\.custom_call",
    "dynamic shape": r"tensor<[^>]*\?|stablehlo\.(real_dynamic|dynamic_reshape|get_dimension_size)",
    "64-bit type": r"tensor<(?:\d+x)*[ui]?[if]64>",
    "scatter": r"stablehlo\.scatter",
    "host transfer": r"stablehlo\.(infeed|outfeed|send|recv)",
}


def violations(module: str) -> set[str]:
    """What in a StableHLO module a decoding round must not have."""
    # Attributes such as a window's padding are 64-bit by definition and never reach the device.
    module = re.sub(r"<\{.*?\}>|dense<[^>]*> : tensor<[^>]*i64>", "", module)
    return {name for name, pattern in FORBIDDEN.items() if re.search(pattern, module)}


def tiny(family: str = "qwen3", drafter: str = "dflash", **plan) -> aot.AbstractPair:
    _, config, extra = FAMILIES[family]
    target = config(**(TINY | extra))
    drafters = {
        "dflash": lambda: td.DFlashConfig(
            vocab_size=target.vocab_size,
            hidden_size=target.hidden_size,
            intermediate_size=40,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=16,
            max_position_embeddings=512,
            num_target_layers=target.num_hidden_layers,
            target_layer_ids=[0, 2],
            block_size=6,
            mask_token_id=MASK,
            layer_types=["full_attention", "sliding_attention"],
            sliding_window=5,
        ),
        "ngram": lambda: NGramProposer(width=5),
        "plain": lambda: None,
    }
    return aot.abstract_pair(target, drafters[drafter](), capacity=64, batch_size=3, **plan)


CASES = [
    ("qwen3", "dflash"),
    ("llama", "dflash"),
    ("qwen2", "dflash"),
    ("gpt_oss", "dflash"),
    ("qwen3", "ngram"),
    ("qwen3", "plain"),
]


@pytest.mark.parametrize("chunk", [False, True], ids=["round", "chunk"])
@pytest.mark.parametrize(("family", "drafter"), CASES)
def test_round_exports_for_tpu(family, drafter, chunk):
    exported = aot.export_round(tiny(family, drafter), chunk=chunk)
    assert exported.platforms == ("tpu",)
    assert not violations(exported.mlir_module())


def test_whole_chunk_is_one_loop_on_the_device():
    module = aot.export_round(tiny(), chunk=True).mlir_module()
    assert "stablehlo.while" in module
    assert "stablehlo.while" not in aot.export_round(tiny()).mlir_module()


def test_large_batch_writes_rows_in_a_loop_without_scatter():
    assert not violations(aot.export_round(tiny(stop_slots=2, verify_width=4)).mlir_module())
    _, config, extra = FAMILIES["qwen3"]
    model = aot.abstract_pair(config(**(TINY | extra)), None, capacity=64, batch_size=20)
    assert not violations(aot.export_round(model).mlir_module())


def test_sampling_with_filters_exports():
    # Sorting the vocabulary is the one thing that may be a custom call on another platform.
    assert not violations(aot.export_round(tiny(filters=True)).mlir_module())


def test_the_checks_see_a_scatter():
    shape = jax.ShapeDtypeStruct((2, 4), jnp.float32)

    def scatter(x):
        return x.at[jnp.arange(2), jnp.array([1, 0])].set(0)

    module = jax.export.export(jax.jit(scatter), platforms=["tpu"])(shape).mlir_module()
    assert violations(module) == {"scatter"}


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("%0 = stablehlo.add %a, %b : tensor<2x?xf32>", {"dynamic shape"}),
        ("%0 = stablehlo.add %a, %b : tensor<2xi64>", {"64-bit type"}),
        ("%0 = stablehlo.add %a, %b : tensor<f64>", {"64-bit type"}),
        ("%0 = stablehlo.custom_call @xla_python_callback(%a) : tensor<f32>", {"custom call"}),
        ('%0 = "stablehlo.send"(%a, %b) : tensor<f32>', {"host transfer"}),
        ("%0 = stablehlo.pad %a <{padding = dense<0> : tensor<2x2xi64>}> : tensor<2xi32>", set()),
    ],
)
def test_the_checks_read_types(line, found):
    assert violations(line) == found


def test_abstract_pair_has_tied_weights_once_and_its_buffers_in_float32():
    tied, untied = tiny("qwen3"), tiny("llama")
    assert "target.model.lm_head.weight" not in tied.params
    assert "target.model.lm_head.weight" in untied.params
    buffers = {name: shape for name, shape in tied.params.items() if "inv_freq" in name}
    assert buffers and all(shape.dtype == jnp.float32 for shape in buffers.values())
    weights = [shape for name, shape in tied.params.items() if name not in buffers]
    assert all(shape.dtype == jnp.bfloat16 for shape in weights)
    assert tied.state.cache[0].key.dtype == jnp.bfloat16
    assert not [leaf for leaf in jax.tree.leaves(tied.state) if isinstance(leaf, jax.Array)]


def test_the_abstract_state_is_the_real_one():
    model = tiny()
    target = FAMILIES["qwen3"][0](model.pair.target.config)
    drafter = td.DFlashDraftModel(model.pair.proposer.drafter.config)
    engine = td.compile(target, drafter, max_length=64, batch_size=3)
    register_states()
    rows = aot.idle_rows(engine.plan)
    real = engine.runtime.begin(engine.runtime.refresh(engine.tensors()), rows)
    shapes = jax.tree.map(lambda leaf: leaf.shape, real)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, model.state)
    assert set(engine.tensors()) == set(model.params)


def test_missing_compiler_names_the_extra(monkeypatch):
    monkeypatch.setattr(aot, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"torch-dflash\[tpu\]"):
        aot.compile_round(tiny(drafter="plain"), topology="v5p:2x2x2")


def test_several_chips_are_refused():
    with pytest.raises(ValueError, match="chips=4"):
        aot.compile_round(tiny(drafter="plain"), chips=4)


PROGRAM = """\
HloModule jit_step, input_output_alias={ {0}: (2, {}, may-alias), {1}: (0, {}, may-alias) }

%fused (p.0: bf16[64,8], p.1: bf16[2,8], p.2: s32[]) -> bf16[64,8] {
  %p.0 = bf16[64,8]{1,0:T(8,128)} parameter(0)
  %p.1 = bf16[2,8]{1,0:T(8,128)S(1)} parameter(1)
  %p.2 = s32[]{:T(128)S(6)} parameter(2)
  ROOT %dus.1 = bf16[64,8]{1,0:T(8,128)} dynamic-update-slice(%p.0, %p.1, %p.2, %p.2)
}

%body (p.3: (s32[], f32[10])) -> (s32[], f32[10]) {
  %p.3 = (s32[]{:S(6)}, f32[10]{0:T(128)}) parameter(0)
  %n.1 = s32[]{:S(6)} get-tuple-element(%p.3), index=0
  %x.1 = f32[10]{0:T(128)} get-tuple-element(%p.3), index=1
  %y.1 = f32[10]{0:T(128)} add(%x.1, %x.1)
  ROOT %r.1 = (s32[]{:S(6)}, f32[10]{0:T(128)}) tuple(%n.1, %y.1)
}

ENTRY %main (a: bf16[64,8], b: f32[100], c: s32[]) -> bf16[64,8] {
  %a.1 = bf16[64,8]{1,0:T(8,128)} parameter(0)
  %b.1 = f32[100]{0:T(128)} parameter(1)
  %c.1 = s32[]{:T(128)S(6)} parameter(2)
  %cs.1 = (f32[100]{0:T(128)S(1)}, f32[100]{0:T(128)}, u32[]{:S(2)}) copy-start(%b.1)
  %cd.1 = f32[100]{0:T(128)S(1)} copy-done(%cs.1)
  %use.1 = f32[10]{0:T(128)} slice(%cd.1), slice={[0:10]}
  %t.1 = (s32[]{:S(6)}, f32[10]{0:T(128)}) tuple(%c.1, %use.1)
  %w.1 = (s32[]{:S(6)}, f32[10]{0:T(128)}) while(%t.1), condition=%cond, body=%body
  %rows.1 = bf16[2,8]{1,0:T(8,128)S(1)} constant({...})
  ROOT %out.1 = bf16[64,8]{1,0:T(8,128)} fusion(%a.1, %rows.1, %c.1), kind=kLoop, calls=%fused
}
"""


def test_traffic_counts_hbm_once_and_in_place_writes_as_what_they_write():
    prefetch, sliced, body, update = 400, 40, 3 * 40, 2 * 8 * 2
    assert Program(PROGRAM).traffic() == prefetch + sliced + body + update


def test_aliases_are_read_by_path():
    assert read_aliases(PROGRAM, ["a", "b", "c"], ["x", "y"]) == {"x": "c", "y": "a"}


def qwen3_4b_width(batch_size: int) -> aot.AbstractPair:
    """Four layers of Qwen3-4B's dimensions and a five-layer drafter, context 4096, bf16."""
    shape = {
        "vocab_size": 151936,
        "hidden_size": 2560,
        "intermediate_size": 9728,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "max_position_embeddings": 40960,
    }
    target = Qwen3Config(**shape, num_hidden_layers=4, tie_word_embeddings=True)
    drafter = td.DFlashConfig(
        **shape,
        num_hidden_layers=5,
        num_target_layers=4,
        target_layer_ids=[0, 1, 2, 3, 3],
        block_size=16,
        mask_token_id=151669,
    )
    return aot.abstract_pair(target, drafter, capacity=4096, batch_size=batch_size, dtype=torch.bfloat16)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("chunk", "batch_size", "most"),
    [(False, 1, 1.1), (True, 1, 1.1), (True, 4, 1.2)],  # scores of 4096 slots grow with the batch
    ids=["round", "chunk", "chunk of 4 rows"],
)
def test_round_compiles_for_one_v5p_chip(chunk, batch_size, most, capsys):
    model = qwen3_4b_width(batch_size)
    compiled = aot.compile_round(model, chunk=chunk)

    leaves = jax.tree_util.tree_leaves_with_path(model.state)
    paths = [jax.tree_util.keystr(path) for path, _ in leaves]
    assert {".tokens", ".cache[3].value", ".proposer.layers[4].key", ".proposer.context"} < set(paths)
    assert compiled.aliases == {path: f"[1]{path}" for path in paths}
    state_bytes = sum(leaf.size * leaf.dtype.itemsize for _, leaf in leaves)
    assert compiled.alias_bytes >= state_bytes

    instructions = [i for body in Program(compiled.hlo).computations.values() for i in body.values()]
    ops = {i.op for i in instructions}
    assert not ops & {"infeed", "outfeed", "send", "recv", "scatter"}
    # The TPU compiler turns a scatter into a loop over what it scatters: only the loop of rounds may be left.
    assert sum(i.op == "while" for i in instructions) == chunk
    calls = set(re.findall(r'custom_call_target="([^"]*)"', compiled.hlo))
    assert not {call for call in calls if re.search("callback|host", call, re.IGNORECASE)}
    assert not re.search(r"\w\[[\d,]*<=", compiled.hlo)  # a bounded dynamic dimension

    cache = "bf16[" + ",".join(map(str, model.state.cache[0].key.shape)) + "]"
    moved = {i.op for i in instructions if i.type.lstrip("(").startswith(cache)}
    assert not moved & {"copy", "copy-start", "transpose", "convert", "scatter", "select"}

    # The floor: weights and K/V once, and the tied embedding once more, for drafts and target share the head.
    embedding = np.prod(model.params["target.model.model.embed_tokens.weight"].shape) * 2
    floor = compiled.argument_bytes + int(embedding)
    sizes = {
        "argument": compiled.argument_bytes,
        "output": compiled.output_bytes,
        "temp": compiled.temp_bytes,
        "alias": compiled.alias_bytes,
        "HBM traffic of a round": compiled.traffic_bytes,
        "its floor": floor,
        "XLA's bytes accessed, VMEM included": compiled.cost["bytes accessed"],
    }
    step = "chunk" if chunk else "round"
    with capsys.disabled():
        print(f"\nv5p, {step}, B={batch_size}, {compiled.compile_seconds:.1f} s; in MB:")
        print("  " + "; ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items()))
    assert 0.98 * floor < compiled.traffic_bytes < most * floor
