"""The decoding round as a TPU program: exported in every run, compiled with the TPU compiler under `aot`."""

import re
from functools import cache

import jax
import jax.numpy as jnp
import pytest
import torch
from support.authors import SECOND
from support.tiny import BASE as TINY
from support.tiny import FAMILIES, make_pair
from support.wide import qwen3_4b_width
from torch.utils._pytree import tree_leaves, tree_map

import torch_dflash as td
from jax_bridge.aot import compile as aot
from jax_bridge.aot import compile as passes
from jax_bridge.aot import shapes as topology
from jax_bridge.aot.compile import feature_shape
from jax_bridge.aot.floor import floor_of
from jax_bridge.aot.hlo import Program, forbidden
from jax_bridge.state import register_states
from torch_dflash.decode import decode_round
from torch_dflash.proposers import NGramProposer
from torch_dflash.rows import RowRequests
from torch_dflash.selftest.pairs import drafter_config
from torch_dflash.state import PromptChunk

# The kernels are custom calls; so would host callbacks be.
FORBIDDEN = {
    "custom call": r"stablehlo\.custom_call @(?!(tpu_custom_call|mhlo\.topk)\b)",
    "dynamic shape": r"tensor<[^>]*\?|stablehlo\.(real_dynamic|dynamic_reshape|get_dimension_size)",
    "64-bit type": r"tensor<(?:\d+x)*[ui]?[if]64>",
    "scatter": r"stablehlo\.scatter",
    "host transfer": r"stablehlo\.(infeed|outfeed|send|recv)",
}


def violations(module: str) -> set[str]:
    """Returns the names of all that a StableHLO module has and a decoding round must not have."""
    # Attributes such as a window's padding are 64-bit by definition and never reach the device.
    module = re.sub(r"<\{.*?\}>|dense<[^>]*> : tensor<[^>]*i64>", "", module)
    return {name for name, pattern in FORBIDDEN.items() if re.search(pattern, module)}


def tiny(family: str = "qwen3", drafter: str = "dflash", **plan) -> aot.AbstractPair:
    _, config, extra = FAMILIES[family]
    target = config(**(TINY | extra))
    layers = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 5}
    drafters = {"dflash": lambda: drafter_config(target, **layers)}
    drafters |= {"dflash2": lambda: drafter_config(target, **layers, **SECOND)}
    drafters |= {"ngram": lambda: NGramProposer(width=5), "plain": lambda: None}
    drafters |= {"eagle3": lambda: eagle3_config(target)}
    return aot.abstract_pair(target, drafters[drafter](), capacity=64, batch_size=3, **plan)


def eagle3_config(target, **fields) -> td.Eagle3Config:
    sizes = ["vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"]
    sizes += ["head_dim", "max_position_embeddings"]
    taken = {name: getattr(target, name) for name in sizes}
    return td.Eagle3Config(**taken, num_target_layers=target.num_hidden_layers, **fields)


CASES = [("qwen3", "dflash"), ("llama", "dflash"), ("qwen2", "dflash"), ("gpt_oss", "dflash")]
CASES += [("llama", "dflash2"), ("llama", "eagle3"), ("qwen3", "ngram"), ("qwen3", "plain")]


@cache
def exported(family: str, drafter: str, chunk: bool) -> str:
    """A round, or a chunk of them, as a module for a TPU."""
    made = aot.export_round(tiny(family, drafter), chunk=chunk)
    assert made.platforms == ("tpu",)
    return made.mlir_module()


@pytest.mark.parametrize("chunk", [False, True], ids=["round", "chunk"])
@pytest.mark.parametrize(("family", "drafter"), CASES)
def test_round_exports_for_tpu(family, drafter, chunk):
    assert not violations(exported(family, drafter, chunk))


def test_a_process_of_64_bits_exports_a_round_of_32():
    with jax.enable_x64(True):
        assert not violations(aot.export_round(tiny("qwen3", "plain")).mlir_module())


def test_the_two_passes_of_a_round_are_the_round():
    target, drafter = make_pair("qwen3")
    engine = td.compile(target, drafter, runtime="eager", max_length=64)
    params, pair = engine.runtime.refresh(engine.tensors()), engine.pair
    state = engine.runtime.begin(params, RowRequests.idle(engine.plan))
    ids = torch.arange(1, 10, dtype=torch.int32)[None]
    chunk = PromptChunk(ids, torch.tensor([9], dtype=torch.int32), torch.tensor([-1], dtype=torch.int32))
    state = engine.runtime.prefill(params, state, chunk)

    def copy(state):  # a step consumes what it is given
        return tree_map(torch.clone, state)

    features = torch.randn(feature_shape(pair))
    drafted = pair.run(passes.draft_pass, params, copy(state), features)
    verified, tapped = pair.run(passes.verify_pass, params, copy(drafted))
    again = pair.run(passes.draft_pass, params, copy(state), tapped)  # now with the missing features
    whole = decode_round(pair, params, copy(state))
    assert tapped.shape == features.shape and not torch.equal(tapped, features)
    for ours, rounds in (
        (verified.cache, whole.cache),
        (verified.tokens, whole.tokens),
        (again.proposer.layers, whole.proposer.layers),
        (again.proposer.context, whole.proposer.context),
    ):
        for one, other in zip(tree_leaves(ours), tree_leaves(rounds), strict=True):
            assert torch.equal(one, other)


def test_whole_chunk_is_one_loop_on_the_device():
    assert "stablehlo.while" in exported("qwen3", "dflash", True)
    assert "stablehlo.while" not in exported("qwen3", "dflash", False)


def test_large_batch_writes_rows_in_a_loop_without_scatter():
    assert not violations(aot.export_round(tiny(drafter="ngram", stop_slots=2, verify_width=4)).mlir_module())
    _, config, extra = FAMILIES["qwen3"]
    model = aot.abstract_pair(config(**(TINY | extra)), None, capacity=64, batch_size=20)
    assert not violations(aot.export_round(model).mlir_module())


def test_a_grammar_as_a_table_exports_without_the_host():
    kinds = (td.processors.GrammarTable(states=16, classes=16, vocab_size=TINY["vocab_size"]),)
    assert not violations(aot.export_round(tiny(processors=kinds), chunk=True).mlir_module())


@pytest.mark.aot
def test_a_grammar_on_the_host_compiles_into_the_loop_for_a_tpu():
    asked, plain = (
        aot.compile_round(tiny(processors=kinds), chunk=True)
        for kinds in ((td.processors.GrammarMatcher(),), ())
    )
    words = ("is_host_transfer=true", "callback")
    assert any(word in asked.hlo for word in words) and not any(word in plain.hlo for word in words)


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
        ("%0 = stablehlo.custom_call @tpu_custom_call(%a) : tensor<f32>", set()),
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
    rows = RowRequests.idle(engine.plan)
    real = engine.runtime.begin(engine.runtime.refresh(engine.tensors()), rows)
    shapes = jax.tree.map(lambda leaf: leaf.shape, real)
    assert shapes == jax.tree.map(lambda leaf: leaf.shape, model.state)
    assert set(engine.tensors()) == set(model.params)


def test_a_missing_compiler_is_told_with_its_package(monkeypatch):
    monkeypatch.setattr(topology, "find_spec", lambda name: None)
    with pytest.raises(ModuleNotFoundError, match=r"pip install 'jax\[tpu\]'"):
        aot.compile_round(tiny(drafter="plain"), topology="v5p:2x2x2")


@pytest.mark.parametrize("rows", [None, 8, 48, 128])  # the tiny pair has room for 80
def test_prompt_rows_that_no_prompt_is_fed_in_are_refused(rows):
    with pytest.raises(ValueError, match=f"prompt_rows={rows}: .*power of two.* at least 16 and .* most 80"):
        aot.compile_step(tiny(), "prefill", prompt_rows=rows)


@pytest.mark.aot
@pytest.mark.parametrize(
    ("chunk", "batch_size", "most"),
    [(False, 1, 1.03), (True, 1, 1.03), (True, 4, 1.08)],  # the logits grow with the batch
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
    assert compiled.alias_bytes >= state_bytes and not compiled.unaliased
    instructions = Program(compiled.hlo).instructions()
    ops = {i.op for i in instructions}
    assert "scatter" not in ops and not forbidden(compiled.hlo) and not Program(compiled.hlo).collectives()
    # The TPU compiler turns a scatter into a loop over what it scatters: only the loop of rounds may be left.
    assert sum(i.op == "while" for i in instructions) == chunk
    cache = "bf16[" + ",".join(map(str, model.state.cache[0].key.shape)) + "]"
    moved = {i.op for i in instructions if i.type.lstrip("(").startswith(cache)}
    assert not moved & {"copy", "copy-start", "transpose", "convert", "scatter", "select"}
    floor = floor_of(model.pair, model.params, context=4096).round
    sizes = {"argument": compiled.argument_bytes, "output": compiled.output_bytes}
    sizes |= {"temp": compiled.temp_bytes, "alias": compiled.alias_bytes}
    sizes |= {"HBM traffic of a round": compiled.traffic_bytes, "its floor": floor}
    sizes |= {"XLA's bytes accessed, VMEM included": compiled.cost["bytes accessed"]}
    step = "chunk" if chunk else "round"
    with capsys.disabled():
        print(f"\nv5p, {step}, B={batch_size}, {compiled.compile_seconds:.1f} s; in MB:")
        print("  " + "; ".join(f"{name} {size / 1e6:.1f}" for name, size in sizes.items()))
    assert 0.98 * floor < compiled.traffic_bytes < most * floor
    # The same program costs what its context is: at 512 tokens an eighth of the K/V.
    short = floor_of(model.pair, model.params, context=512).round
    assert 0.98 * short < compiled.traffic_at(512) < (most + 0.01) * short


@cache
def eagle3_width(drafts: int) -> aot.AbstractPair:
    target = qwen3_4b_width(1).pair.target.config
    config = eagle3_config(target, block_size=drafts + 1, own_head=True, draft_vocab_size=32000)
    return aot.abstract_pair(target, config, capacity=4096, dtype=torch.bfloat16)


def test_each_further_pass_of_a_chain_reads_the_layer_and_the_head():
    two, four = (floor_of(model.pair, model.params, 4096).draft for model in map(eagle3_width, (2, 4)))
    hidden, cached = 2560, 2 * 8 * 128 * 4096
    layer = hidden * (2 * 4096 + 2 * 2 * 1024 + 4096 + 3 * 9728)  # queries, keys and values, output, MLP
    norms = 4 * hidden
    assert four - two == 2 * 2 * (layer + norms + 32000 * hidden + cached)


@pytest.mark.aot
def test_a_round_with_a_chain_of_passes_compiles_for_one_v5p_chip(capsys):
    """The passes are a loop in the program, whose bytes count once a trip."""
    model = eagle3_width(5)
    compiled = aot.compile_round(model)
    instructions = Program(compiled.hlo).instructions()
    assert sum(one.op == "while" for one in instructions) == 1 and not forbidden(compiled.hlo)
    assert not compiled.unaliased
    floor = floor_of(model.pair, model.params, context=4096).round
    with capsys.disabled():
        print(
            f"\nv5p, EAGLE-3 of 5 drafts: {compiled.traffic_bytes / 1e6:.1f} MB, floor {floor / 1e6:.1f} MB"
        )
    assert 0.98 * floor < compiled.traffic_bytes < 1.1 * floor


@pytest.mark.aot
def test_penalties_and_bans_cost_little_of_a_round_on_v5p():
    """Four layers: of the whole model's 36 it is a sixth of this."""
    plain = aot.compile_round(qwen3_4b_width(1))
    known = td.processors
    for kinds in ((known.RepetitionPenalty(),), (known.OccurrencePenalty(), known.Bans())):
        asked = aot.compile_round(qwen3_4b_width(1, processors=kinds))
        assert not asked.unaliased  # memories are updated in place
        assert "while" not in {i.op for i in Program(asked.hlo).instructions()}  # the form of a scatter
        assert asked.traffic_bytes < 1.02 * plain.traffic_bytes
