"""Each weight has its place on a slice, and logits in parts have the right best id."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh, Mesh
from jax.sharding import PartitionSpec as P
from support.families import MORE
from support.hybrids import KINDS, make_hybrid
from support.refusals import refuses
from support.slices import run_on_four
from support.tiny import BASE, FAMILIES, make_drafter

import jax_bridge as jb
import torch_dflash as td
from jax_bridge.mesh.cut import COLUMN, EXPERTS, GATHER, HEADS, ROW
from jax_bridge.mesh.rules import partitions_of_drafter, partitions_of_target
from jax_bridge.mesh.shape import ALL, KV, Heads, are_cut, devices_of, slice_mesh
from jax_bridge.programs.lower import Programs
from torch_dflash.targets.latents import find_latents, weights_of

FIXED = {"max_length": 64, "prefill_chunk_size": 16}


def mesh_of(kv: int, copies: int) -> AbstractMesh:
    return AbstractMesh((kv, copies), ALL)


def target_of(family: str, **sizes):
    cls, config, extra = (FAMILIES | MORE)[family]
    return cls(config(**(BASE | extra | {"vocab_size": 100} | sizes)))


def found(ways) -> dict:
    """(Spec, kind) by the name within a layer, for the first layer and for weights outside of layers."""
    named = {name.split("layers.0.")[-1]: way for name, way in ways.items() if "layers.1" not in name}
    return {name: (way.spec, way.kind) for name, way in named.items() if way.spec != P()}


LAYER = {"self_attn.q_proj.weight": (P(ALL), COLUMN), "self_attn.k_proj.weight": (P(KV), COLUMN)}
LAYER |= {"self_attn.v_proj.weight": (P(KV), COLUMN), "self_attn.o_proj.weight": (P(None, ALL), ROW)}
MLP = {"mlp.gate_proj.weight": (P(ALL), COLUMN), "mlp.up_proj.weight": (P(ALL), COLUMN)}
MLP |= {"mlp.down_proj.weight": (P(None, ALL), ROW)}
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


def test_each_weight_of_latents_lies_where_it_should():
    target = target_of("deepseek_v3", num_hidden_layers=1)
    wide = weights_of(find_latents(target))
    ways = found(partitions_of_target(target, mesh_of(4, 1), wide))
    own = {"self_attn.q_b_proj.weight": (P(ALL), COLUMN), "self_attn.kv_b_proj.weight": (P(ALL), HEADS)}
    assert ways == own | {"self_attn.o_proj.weight": (P(None, ALL), ROW)} | MLP | TABLES
    ways = found(partitions_of_target(target, AbstractMesh((1, 3), ALL), wide))  # four heads
    assert not [name for name in ways if "self_attn" in name]


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


def pair(mesh, family="qwen3", drafter=None, hooked=False, **options):
    target = make_hybrid(family) if family in KINDS else target_of(family)
    for layer in target.model.layers if hooked else ():
        layer.self_attn.kv_b_proj.register_forward_hook(lambda module, args, out: 2 * out)
    drafts = None if drafter is None else make_drafter(target, vocab_size=100, **drafter)
    td.compile(target, drafts, mesh=mesh, **(FIXED | options))


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"family": "gemma2"}, ["model_type='gemma2'", "leave mesh out"]),
        ({"family": "deepseek_v3", "hooked": True}, ["layer 0", "'latent'", "hook on kv_b_proj"]),
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


BEST = """
import types, torch
import jax, jax.numpy as jnp, numpy as np
import jax_bridge.mesh.best as best
from jax_bridge.mesh.current import Slice
from jax_bridge.mesh.shape import Heads, slice_mesh
own = Slice(slice_mesh(jax.devices(), Heads(4, 2)), frozenset(), frozenset({40}))
rows = np.random.default_rng(0).integers(0, 6, (64, 40)).astype(np.float32)  # many equal, on several chips
rows[1], rows[2], rows[3, 17:] = -np.inf, 0.0, 9.0
unordered = rows.copy()
unordered[4, [13, 31]], unordered[5, 39] = np.nan, np.nan
def wrong():
    "What differs from the whole."
    one = np.asarray(jax.jit(lambda x: best.argmax_on_slice(own, x))(unordered))
    kept = np.asarray(jax.jit(lambda x: best.argmax_on_slice(own, x, keepdim=True))(unordered))
    names = [f"argmax {row}" for row in range(64) if one[row] != unordered[row].argmax()]
    names += [] if np.array_equal(kept[:, 0], one) else ["keepdim"]
    for count in (1, 25):  # a chip has ten
        found = jax.jit(lambda x: best.topk_on_slice(own, x, count))(rows)
        same = map(np.array_equal, found, jax.lax.top_k(rows, count))
        names += [f"{part} of {count}" for part, is_same in zip(("values", "places"), same) if not is_same]
    names += ["likeliest"] if unlikely() else []
    return names
def unlikely():
    "Whether the likeliest are others than those of the whole."
    from torch_dflash.ops.spread import likeliest
    logits, scale = rows.copy(), np.asarray([1.0, 0.7, 2.5, 1e-30] * 16, np.float32)[:, None]
    logits[1, 0], logits[4, 10:] = 1.0, -np.inf  # on three chips no other entry
    logits[5, 3] = 3e38
    found = jax.jit(lambda x, s: best.likeliest_on_slice(own, x, s, 12))(logits, scale)
    wanted = likeliest.plain(*map(torch.from_numpy, (logits, scale)), 12)
    same = [np.allclose(found[at], wanted[at].numpy(), atol=1e-6) for at in (0, 2)]
    return not all(same) or not np.array_equal(found[1], jax.lax.top_k(logits, 12)[1])  # torch's ties differ
assert wrong() == [], wrong()
def exchange(argmax):
    best.jnp = types.SimpleNamespace(**vars(jnp) | {"argmax": argmax})
    return wrong()
last = lambda x, **options: x.shape[-1] - 1 - jnp.argmax(x[..., ::-1], **options)
assert "argmax 2" in (found := exchange(last)) and "argmax 1" in found, found
number = lambda x, **options: jnp.argmax(jnp.where(jnp.isnan(x), -jnp.inf, x), **options)
assert (found := exchange(number)) == ["argmax 4", "argmax 5"], found
assert exchange(jnp.argmax) == []
finite, best._finite = best._finite, lambda top: top  # a chip with no entry but -inf
assert (found := wrong()) == ["likeliest"], found
best._finite = finite
gathered = best._of_all_chips
best._of_all_chips = lambda *parts: [one[..., ::-1] for one in gathered(*parts)]  # in another order
assert {"argmax 2", "places of 25"} <= set(found := wrong()) and "values of 25" not in found, found
print("checked")
"""


@pytest.mark.heavy
def test_parts_have_the_best_of_the_whole_and_another_order_is_seen():
    assert run_on_four(["-c", BEST]).strip().endswith("checked")
