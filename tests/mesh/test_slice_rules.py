"""Where each weight lies: transformers' plans, ours beside them, and what does not divide."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from support.families import MORE
from support.hybrids import KINDS, make_hybrid
from support.refusals import refuses
from support.tiny import BASE, FAMILIES, make_drafter

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.mesh.cut import COLUMN, EXPERTS, GATHER, ROW
from jax_bridge.mesh.rules import partitions_of_drafter, partitions_of_target
from jax_bridge.mesh.shape import ALL, KV, Heads, are_cut, devices_of, slice_mesh
from jax_bridge.programs.lower import Programs

FIXED = {"max_length": 64, "prefill_chunk_size": 16}


def mesh_of(kv: int, copies: int) -> AbstractMesh:
    return AbstractMesh((kv, copies), ALL)


def target_of(family: str, **sizes):
    cls, config, extra = (FAMILIES | MORE)[family]
    return cls(config(**(BASE | extra | {"vocab_size": 100} | sizes)))


def found(ways) -> dict:
    """(Spec, kind) by the name within a layer, of the first layer and of what is in none."""
    named = {name.split("layers.0.")[-1]: way for name, way in ways.items() if "layers.1" not in name}
    return {name: (way.spec, way.kind) for name, way in named.items() if way.spec != P()}


LAYER = {
    "self_attn.q_proj.weight": (P(ALL), COLUMN),
    "self_attn.k_proj.weight": (P(KV), COLUMN),
    "self_attn.v_proj.weight": (P(KV), COLUMN),
    "self_attn.o_proj.weight": (P(None, ALL), ROW),
}
MLP = {
    "mlp.gate_proj.weight": (P(ALL), COLUMN),
    "mlp.up_proj.weight": (P(ALL), COLUMN),
    "mlp.down_proj.weight": (P(None, ALL), ROW),
}
BIASES = {f"self_attn.{part}_proj.bias": (P(KV if part in "kv" else ALL), None) for part in "qkv"}
TABLES = {"model.embed_tokens.weight": (P(ALL), COLUMN), "lm_head.weight": (P(ALL), COLUMN)}


@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "qwen3_moe", "gpt_oss"])
def test_each_weight_of_a_target_lies_where_it_should(family):
    ways = found(partitions_of_target(target_of(family, num_hidden_layers=1), mesh_of(2, 2)))
    wanted = LAYER | TABLES
    if family == "qwen3":  # tied
        wanted = LAYER | {"model.embed_tokens.weight": (P(ALL), COLUMN)}
    if family in ("qwen3_moe", "gpt_oss"):
        wanted |= {f"mlp.experts.{part}_proj": (P(ALL), EXPERTS) for part in ("gate_up", "down")}
    else:
        wanted |= MLP
    if family in ("qwen2", "gpt_oss"):
        wanted |= BIASES
    if family == "gpt_oss":
        wanted |= {f"mlp.experts.{part}_proj_bias": (P(ALL), None) for part in ("gate_up", "down")}
        wanted |= {"self_attn.sinks": (P(ALL), None)}
    assert ways == wanted


def test_each_weight_of_a_drafter_lies_where_it_should():
    second = {"selector_rank": 12, "selector_top_k": 4, "conv_group_size": 8}
    drafter = make_drafter(target_of("qwen3"), vocab_size=100, num_hidden_layers=1, **second)
    ways = found(partitions_of_drafter(drafter, mesh_of(2, 2)))
    codebooks = {
        f"candidate_selector.{name}": (P(ALL), COLUMN) for name in drafter.candidate_selector.lookups
    }
    assert ways == LAYER | MLP | {"fc.weight": (P(ALL), GATHER)} | codebooks


def test_what_does_not_divide_stays_whole():
    odd = target_of("qwen3", vocab_size=97, intermediate_size=50, num_hidden_layers=1)
    ways = found(partitions_of_target(odd, mesh_of(2, 2)))
    assert ways == LAYER
    ways = found(partitions_of_target(target_of("qwen2", num_attention_heads=6), mesh_of(1, 4)))
    assert not [name for name in ways if "self_attn" in name] and set(MLP) <= set(ways)


@pytest.mark.parametrize(
    ("devices", "queries", "groups", "kv"),
    [(4, 8, 4, 4), (4, 8, 2, 2), (2, 8, 8, 2), (8, 32, 4, 4), (16, 64, 8, 8), (4, 14, 2, 1), (6, 12, 4, 1)],
)
def test_the_axes_of_a_mesh_are_heads_and_their_copies(devices, queries, groups, kv):
    mesh = slice_mesh(jax.devices()[:1] * devices, Heads(queries, groups))
    assert dict(mesh.shape) == {"kv": kv, "rep": devices // kv}
    assert are_cut(Heads(queries, groups), mesh) == (kv > 1)


def test_heads_beside_queries_of_other_heads_are_not_cut():
    mesh = mesh_of(2, 2)
    assert are_cut(Heads(4, 2), mesh) and not are_cut(Heads(8, 4), mesh) and not are_cut(Heads(6, 2), mesh)


def test_a_program_is_of_the_places_of_its_arguments():
    programs, one = Programs("highest"), jax.numpy.ones(4)
    device = jax.devices()[0]
    other = jax.device_put(one, jax.sharding.NamedSharding(Mesh(np.array([device]), ("model",)), P()))
    assert programs.get("step", lambda x: x + 1, (one,)) is programs.get("step", lambda x: x + 1, (one,))
    assert programs.get("step", lambda x: x + 1, (one,)) is not programs.get(
        "step", lambda x: x + 1, (other,)
    )


def test_meshes_that_are_none():
    device = jax.devices()[0]
    assert devices_of(None) is devices_of(1) is devices_of("auto") is None
    with refuses(ValueError, "mesh=99", "JAX has 1 device"):
        devices_of(99)
    for wrong in ([4], np.array([1, 2])):
        with refuses(TypeError, f"mesh={wrong!r}", "jax.sharding.Mesh"):
            devices_of(wrong)
    with refuses(ValueError, "mesh has no devices", '"auto"'):
        devices_of(Mesh(np.array([]), ("model",)))
    with refuses(ValueError, "('data', 'model')", "'model'"):
        devices_of(Mesh(np.array([[device, device]]), ("data", "model")))
    for wrong in ("all", "4", 0, -1, True, 2.0):
        with refuses(ValueError, f"mesh={wrong!r}"):
            td.compile(target_of("qwen3"), None, mesh=wrong, **FIXED)
        with refuses(ValueError, f"mesh={wrong!r}"):
            jb.load("nowhere", mesh=wrong)
    with refuses(ValueError, "mesh=2", "runtime='eager'", "runtime='xla'"):
        td.compile(target_of("qwen3"), None, mesh=2, runtime="eager", **FIXED)


def test_chips_of_one_slice_are_different_ones(tmp_path):
    twice = Mesh(np.array(jax.devices()[:1] * 2), ("model",))
    target_of("qwen3").save_pretrained(tmp_path)
    with refuses(ValueError, "mesh", str(jax.devices()[0]), "2 times", "replicas=2"):
        pair(twice)
    with refuses(ValueError, "mesh", str(jax.devices()[0]), "2 times"):
        jb.load(tmp_path, mesh=twice)


def pair(mesh, family="qwen3", drafter=None, **options):
    target = make_hybrid(family) if family in KINDS else target_of(family)
    drafts = None if drafter is None else make_drafter(target, vocab_size=100, **drafter)
    td.compile(target, drafts, mesh=mesh, **(FIXED | options))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"family": "gemma2"}, ["model_type='gemma2'", "leave mesh out"]),
        ({"family": "deepseek_v3"}, ["model_type='deepseek_v3'"]),
        ({"family": "kimi_linear"}, ["model_type='kimi_linear'", "its recurrent layers", "leave mesh out"]),
        ({"family": "lfm2"}, ["model_type='lfm2'", "its recurrent layers", "leave mesh out"]),
        ({"compute": "bfloat16"}, ["compute='bfloat16'", "with a mesh"]),
        ({"quantize": "int8"}, ["quantize='int8'", "with a mesh"]),
        ({"processors": (td.BlockProcessor(lambda tokens, length, logits: logits),)}, ["BlockProcessor"]),
        ({"processors": ("grammar",)}, ["GrammarMatcher"]),
        ({"drafter": {"attention_sink_bias": True}}, ["attention_sink_bias=True of the drafter"]),
        ({"drafter": {"own_head": True}}, ["own_head=True of the drafter"]),
        ({"drafter": {"aux_hidden_norms": True}}, ["aux_hidden_norms=True of the drafter"]),
        ({"drafter": {"markov_rank": 4}}, ["markov_rank=4 of the drafter"]),
    ],
)
def test_what_was_not_tried_on_a_mesh_is_refused(given, words):
    with refuses(ValueError, *words):
        pair(Mesh(np.array(jax.devices()[:1] * 2), ("model",)), **given)
