"""Rounds of large pairs compiled for slices: what each chip moves, and what the chips exchange."""

import re
from collections import Counter
from contextlib import nullcontext
from typing import Any

import jax
import pytest
from jax.sharding import PartitionSpec as P
from support.large import large_pair

from jax_bridge import ops
from jax_bridge._torchax import call_torch
from jax_bridge.aot import compile as aot
from jax_bridge.aot.hlo import Program, exchanges, forbidden
from jax_bridge.aot.shapes import floor_on_slice
from jax_bridge.devices.on_mesh import shardings
from jax_bridge.mesh import current, rules
from jax_bridge.mesh.cut import Partition
from jax_bridge.mesh.shape import ALL
from jax_bridge.weights.products import linear_jax
from torch_dflash.ops.spread import likeliest

pytestmark = pytest.mark.aot
CONTEXT = 4000
MOST = 1.05


def faults(
    name: str,
    topology: str,
    chips: int,
    *,
    step: str = "round",
    drafter: str = "v1",
    chain: int = 0,
    most: float = MOST,
    **plan: Any,
) -> list[str]:
    """Lists the faults of a step on a slice. ``chain``: rows of codebooks that a selector looks up."""
    options = {"capacity": 4064, "cache": "paged", "matmul_precision": "default"} | plan
    model = aot.abstract_pair(*large_pair(name, drafter), **options)
    compiled = aot.compile_step(model, step, topology=topology, chips=chips)
    place = aot.place_of(model, topology, chips)
    floor = getattr(floor_on_slice(model, place, CONTEXT), step)
    fixed, hidden = model.pair.plan, model.pair.target.hidden_size
    rows = fixed.batch_size * fixed.verify_width * hidden
    drafts = 1 if step == "round" else 0
    found = exchanges(Program(compiled.hlo))
    wide = [one for one in found if one.kind == "all-reduce" and one.bytes in (2 * rows, 4 * rows)]
    sums, wanted = sum(one.count for one in wide), 2 * 2 + 1 + 3 * drafts
    # All but those of the embeddings: only one of their summands is not zero.
    exact = sum(one.count for one in wide if one.bytes == 4 * rows)
    state = shardings(model.state, place.slice)
    parts = [
        at.shard_shape(leaf.shape)
        for leaf, at in zip(jax.tree.leaves(model.state), jax.tree.leaves(state), strict=True)
    ]
    share = sum(
        leaf.dtype.itemsize * _size(shape)
        for leaf, shape in zip(jax.tree.leaves(model.state), parts, strict=True)
    )
    wrong = {
        f"{compiled.traffic_bytes / floor:.3f} of the floor": not 0.98
        < compiled.traffic_bytes / floor
        <= most,
        f"{sums} sums of all rows, not {wanted}": sums != wanted,
        f"{exact} sums in float32": exact != wanted - 1 - drafts,
        "not in place": bool(compiled.unaliased) or compiled.alias_bytes < share,
        "forbidden": bool(forbidden(compiled.hlo)),
    }
    others = [one for one in found if one not in wide]
    small = fixed.batch_size * fixed.verify_width * 4
    for one in others:
        wrong[f"{one.kind} {one.shape}"] = one.kind not in ("all-reduce", "all-gather") or one.bytes > (
            2 * rows if one.kind == "all-gather" else max(small, chain)
        )
    return [what for what, is_so in wrong.items() if is_so]


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size


@pytest.mark.parametrize(
    ("name", "topology", "chips"),
    [
        ("qwen3-32b", "v5e:2x4", 8),
        ("qwen3-32b", "v6e:2x4", 8),
        ("qwen3-32b", "v5p:2x2x1", 4),
        ("llama-3.3-70b", "v5p:2x2x2", 8),
        ("llama-3.3-70b", "v5e:4x4", 16),  # each K/V head on two chips
        ("qwen3-coder-30b-a3b", "v5e:2x4", 8),  # the same
        ("gpt-oss-120b", "v5e:2x4", 8),
        ("qwen3.5-27b", "v6e:2x2", 4),  # two recurrent layers
    ],
)
def test_a_round_moves_its_share_and_sums_twice_a_layer(name, topology, chips):
    assert not faults(name, topology, chips)


@pytest.mark.parametrize(("topology", "chips"), [("v5p:2x2x2", 8), ("v5e:4x4", 16)])
def test_the_floor_counts_a_head_on_every_chip_that_has_it(topology, chips):
    model = aot.abstract_pair(*large_pair("llama-3.3-70b"), capacity=4064)  # eight K/V heads
    place = aot.place_of(model, topology, chips)
    short, long = (floor_on_slice(model, place, context) for context in (0, CONTEXT))
    target = model.pair.target.config
    one_head = 2 * 2 * target.head_dim * CONTEXT  # keys and values, two bytes each
    assert long.verify - short.verify == target.num_hidden_layers * one_head


@pytest.mark.parametrize("name", ["qwen3-32b", "qwen3-coder-30b-a3b"])
def test_four_rows_on_static_caches_are_as_good(name):
    assert not faults(name, "v5e:2x4", 8, batch_size=4, cache="static", most=1.1)


def test_two_rows_are_as_good():
    assert not faults("llama-3.3-70b", "v5p:2x2x2", 8, batch_size=2)


@pytest.mark.parametrize(
    ("name", "topology", "rows", "results"),
    [
        ("llama-3.3-70b", "v5p:2x2x2", 1, "f32[1,2"),  # of halves of the keys: a chip has two cores
        ("llama-3.3-70b", "v5p:2x2x2", 2, "bf16[2,1"),  # a sequence each
        ("qwen3-32b", "v5e:2x4", 1, "bf16[1,1"),
    ],
)
def test_one_head_a_chip_is_for_all_of_its_cores(name, topology, rows, results):
    options = {"capacity": 4064, "cache": "paged", "matmul_precision": "default", "batch_size": rows}
    model = aot.abstract_pair(*large_pair(name), **options)
    hlo = aot.compile_step(model, "round", topology=topology, chips=8).hlo
    found = re.findall(r"%(\w+_attention)[.\d]* = \(?(\w+\[\d+,\d+)", hlo)
    assert Counter(found) == {("paged_attention", results): 2, ("block_attention", results): 1}


def test_a_selector_looks_up_its_codebooks_where_they_lie():
    assert not faults("qwen3-32b", "v5e:2x4", 8, drafter="dflash2", chain=15 * 16 * 256 * 2)


def exchanged(**plan: Any) -> Counter:
    options = {"capacity": 4064, "cache": "paged", "matmul_precision": "default"} | plan
    step = aot.compile_step(
        aot.abstract_pair(*large_pair("qwen3-32b"), **options), "round", topology="v5p:2x2x1", chips=4
    )
    return Counter(Program(step.hlo).collectives())


def test_a_tree_exchanges_no_more_than_a_chain(monkeypatch):
    assert not faults("qwen3-32b", "v5p:2x2x1", 4, rows=16)
    chain = exchanged()
    assert exchanged(rows=16) <= chain

    def apart(own, rows, *given):
        return call_torch(likeliest.plain, rows, *given)

    monkeypatch.setattr(ops, "likeliest_on_slice", apart)
    assert not exchanged(rows=16) <= chain


def test_half_a_head_is_noticed(monkeypatch):
    monkeypatch.setattr(rules, "_GROUPED", rules.re.compile(r"\.none\."))
    assert faults("qwen3-coder-30b-a3b", "v5e:2x4", 8)


def test_a_cut_inside_of_experts_is_noticed(monkeypatch):
    real = rules.partitions_of_target

    def inside(model, mesh):
        ways = real(model, mesh)
        cuts = {"gate_up_proj": P(None, ALL), "down_proj": P(None, None, ALL)}
        for name in ways:
            if ".experts." in name:
                ways[name] = Partition(mesh, cuts[name.rpartition(".")[2]])
        return ways

    monkeypatch.setattr(rules, "partitions_of_target", inside)
    assert faults("qwen3-coder-30b-a3b", "v5e:2x4", 8, step="verify")


def test_experts_one_by_one_are_noticed(monkeypatch):
    monkeypatch.setattr(current, "reading_all_experts", nullcontext)
    assert faults("qwen3-coder-30b-a3b", "v5e:2x4", 8, step="verify", verify_width=1)


def test_products_left_to_the_partitioner_are_noticed(monkeypatch):
    monkeypatch.setattr(ops, "partitioned_linear", lambda rows, cut, bias: linear_jax(rows, cut.array, bias))
    found = faults("qwen3-32b", "v5e:2x4", 8, batch_size=4)
    assert "0 sums in float32" in found, found
