"""With recurrent layers cut by heads four devices give one device's text, and hold the same states."""

import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P
from support.hybrids import BEFORE, SLICEABLE, make_hybrid
from support.refusals import refuses
from support.slices import Case, make_sliceable, run_cases, run_on_four

from jax_bridge.mesh.cut import BLOCKS, COLUMN, ROW, InBlocks, Partition, chip_by_chip
from jax_bridge.mesh.refusals import check_family
from jax_bridge.mesh.rules import partitions_of_target
from jax_bridge.mesh.shape import ALL

pytestmark = pytest.mark.skipif(BEFORE, reason="recurrent layers of this transformers are refused by name")
FOUR = AbstractMesh((2, 2), ALL)
BY_BLOCKS, BY_HEADS = (P(ALL), BLOCKS), (P(ALL), COLUMN)
REST = {"A_log": (P(ALL), None), "dt_bias": (P(ALL), None), "conv1d.weight": BY_BLOCKS}
REST |= {"out_proj.weight": (P(None, ALL), ROW)}
APART = {f"in_proj_{part}.weight": BY_HEADS for part in "zba"} | {"in_proj_qkv.weight": BY_BLOCKS} | REST
TOGETHER = {f"in_proj_{part}.weight": BY_HEADS for part in ("qkvz", "ba")} | REST
MIXERS = {"qwen3_5": APART, "qwen3_5_moe": APART, "qwen3_next": TOGETHER, "qwen3_5_whole": {}}


@pytest.mark.parametrize("family", SLICEABLE)
def test_each_weight_of_a_recurrent_layer_lies_where_it_should(family):
    ways = partitions_of_target(make_sliceable(family, "2x2", "plain")[0], FOUR)
    own = {name.split("linear_attn.")[-1]: way for name, way in ways.items() if "linear_attn" in name}
    assert {name: (way.spec, way.kind) for name, way in own.items() if way.spec != P()} == MIXERS[family]
    blocks = {way.blocks for way in own.values() if way.kind == BLOCKS}
    assert blocks == (set() if family == "qwen3_5_whole" else {(4 * 8, 4 * 8, 8 * 12)})
    shared = [way.kind for name, way in ways.items() if "shared_expert." in name]
    assert shared == [COLUMN, COLUMN, ROW] * (2 if shared else 0)


def test_a_chip_has_matching_rows_of_each_block():
    rows, way = jax.numpy.arange(2 * 20.0).reshape(20, 2), Partition(FOUR, P(ALL), BLOCKS, (4, 4, 12))
    stored = chip_by_chip(rows, way)
    for chip in range(4):
        part = slice(5 * chip, 5 * chip + 5)
        wanted = np.concatenate([rows[one] for one in way.rows_of(part)])
        assert np.array_equal(stored[part], wanted)
        assert wanted[:, 0].tolist() == [2 * r for r in (chip, 4 + chip, *range(8 + 3 * chip, 11 + 3 * chip))]
    assert np.array_equal(InBlocks(stored, way).unwrap(), rows)


def test_a_weight_that_no_rule_knows_is_refused():
    target = make_hybrid("qwen3_5")
    target.model.layers[0].linear_attn.register_parameter("gain", target.lm_head.weight)
    with refuses(ValueError, "model.layers.0.linear_attn.gain with a mesh", "merge", "leave mesh out"):
        check_family(target)


SAME = """
import torch
import jax_bridge as jb, torch_dflash as td
from jax_bridge.weights.formats import unwrap
from support.slices import make_sliceable, prompts
target, drafter = make_sliceable("qwen3_5", "2x2", "v1")
target.save_pretrained("FOLDER")
loaded = jb.load("FOLDER", mesh=4)
arrays = unwrap(loaded.arrays)
for name, tensor in target.named_parameters():
    assert torch.equal(torch.tensor(arrays[name].tolist()), tensor), name
options = {"max_length": 64, "batch_size": 3, "prefill_chunk_size": 16, "rounds_per_chunk": 2}
one = td.compile(target, drafter, runtime="eager", cache="paged", **options)
four = td.compile(loaded, drafter, cache="paged", **options)
asked = {"max_new_tokens": 16, "eos_token_id": None, "seed": 3}
for pick in ({"do_sample": False}, {"do_sample": True, "temperature": 0.9, "top_k": 0}):
    texts = [engine.generate(*prompts(), **asked, **pick) for engine in (one, four)]
    assert torch.equal(*texts), texts
states = [engine.advance(engine.start(*prompts(), **asked, do_sample=False)) for engine in (one, four)]
layer = states[1].cache[0]
assert layer.state.addressable_shards[0].data.shape == (3, 2, 8, 12)
assert [part.addressable_shards[0].data.shape[1] for part in layer.tail] == [8, 8, 24]
own, theirs = (engine.runtime.fetch(state) for engine, state in zip((one, four), states))
assert torch.equal(own.length, theirs.length) and int(own.length.min()) > 9
for name in ("state", "tail"):
    both = [getattr(found.cache[0], name) for found in (own, theirs)]
    torch.testing.assert_close(*both, rtol=1e-4, atol=1e-4)
print("checked")
"""


def test_texts_and_states_are_one_devices(tmp_path):
    assert run_on_four(["-c", SAME.replace("FOLDER", str(tmp_path))]).strip().endswith("checked")


CASES = [
    Case("qwen3_5", "static", "4x1", "filters", "dflash2"),
    Case("qwen3_5", "static", "2x2", "greedy", "v1", {"verify_width": "auto"}),
    Case("qwen3_5", "static", "2x2", "sampled", "plain"),
    Case("qwen3_5_whole", "paged", "2x2", "greedy", "v1"),
    Case("qwen3_5", "paged", "whole", "greedy", "ngram"),
    Case("qwen3_5_moe", "paged", "4x1", "greedy", "v1"),
    Case("qwen3_5_moe", "static", "2x2", "sampled", "v1"),
    Case("qwen3_next", "static", "2x2", "greedy", "v1"),
    Case("qwen3_next", "paged", "4x1", "sampled", "dflash2"),
    Case("qwen3_5", "paged", "4x1", "sampled", "v1 tree"),
    Case("qwen3_5_whole", "static", "2x2", "greedy", "v1 union"),
]


@pytest.mark.heavy
@pytest.mark.parametrize("case", CASES, ids=lambda case: "-".join(case[:5]))
def test_the_same_of_every_kind(case):
    (found,) = run_cases([case])
    assert found["one"] == found["four"] and not found["again"]
    assert case.drafter in ("plain", "ngram") or max(map(max, found["one"][0][1])) > 1


@pytest.mark.heavy
def test_channels_that_are_cut_without_their_blocks_are_noticed():
    (found,) = run_cases([Case("qwen3_5", "static", "2x2", "greedy", "plain", {}, {}, "channels in a row")])
    assert found["one"] != found["four"]


CHAT = """
import torch, torch_dflash as td
from support.slices import make_sliceable
target, drafter = make_sliceable("qwen3_5", "2x2", "v1")
said = []
for where in ({"runtime": "eager"}, {"mesh": 4}):
    session = td.compile(target, drafter, max_length=64, filters=False, **where).session()
    asked = {"do_sample": False, "eos_token_id": None, "max_new_tokens": 6}
    turn = lambda text, settled=0: [t for gain in session.gains(text, settled, **asked) for t in gain.tokens]
    prompt = [9, 2, 6, 40, 41, 42, 9, 2, 6]
    first = turn(prompt, len(prompt) - 1)
    second = turn(prompt + first + [7, 8, 9], len(prompt) + 7)
    back, read = turn(prompt + [5, 5, 5]), session.stats.prefilled  # behind the snapshot of the first prompt
    said.append([first, second, back, read])
assert said[0] == said[1] and said[0][3] < 9, said
print("checked")
"""


@pytest.mark.heavy
def test_a_turn_goes_back_to_a_snapshot():
    assert run_on_four(["-c", CHAT]).strip().endswith("checked")
