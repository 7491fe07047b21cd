"""Full published pairs move little more than the floor on one v5p chip, on pages, compiled whole."""

import re
from functools import lru_cache
from typing import Any

import jax
import pytest
from support import ROOT
from transformers import AutoConfig

from jax_bridge.aot import compile as aot
from jax_bridge.aot.floor import floor_of
from jax_bridge.aot.hlo import forbidden
from torch_dflash.cli.loading import load_configs
from torch_dflash.proposers.checkpoints import load_drafter_config

CONFIGS = ROOT / "benchmarks/configs"
CONTEXT = 4096
pytestmark = pytest.mark.aot


@lru_cache
def ratio(pair: str, step: str, rows: int | None = None, kind: str = "dflash") -> tuple[float, int]:
    """Returns (bytes over floor, bytes) of a step, after assertions that hold for every step."""
    target = AutoConfig.from_pretrained(CONFIGS / pair)
    drafter: Any = load_drafter_config(CONFIGS / f"{pair}-{kind}")
    block = max(rows or 0, drafter.block_size)
    model = aot.abstract_pair(
        target, drafter, capacity=CONTEXT, block_size=block, verify_width=rows, cache="paged", page_size=64
    )
    compiled = aot.compile_step(model, step)
    assert not forbidden(compiled.hlo) and not compiled.unaliased
    state = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(model.state))
    assert compiled.alias_bytes >= state
    kernels = compiled.hlo.count('custom_call_target="tpu_custom_call"')
    layers = {"verify": target.num_hidden_layers, "draft": drafter.num_hidden_layers}
    assert kernels == layers.get(step, sum(layers.values()))
    floor = getattr(floor_of(model.pair, model.params, CONTEXT), step)
    assert (
        compiled.traffic_bytes > 0.98 * floor
    )  # less than the least would mean that something is not counted
    return compiled.traffic_bytes / floor, compiled.traffic_bytes


def test_qwen3_4b_verifies_near_its_floor_and_flat():
    assert ratio("qwen3-4b", "verify", 16)[0] <= 1.10
    assert ratio("qwen3-4b", "verify", 64)[0] <= 1.15
    assert ratio("qwen3-4b", "verify", 64)[1] <= 1.10 * ratio("qwen3-4b", "verify", 1)[1]


@pytest.mark.parametrize("pair", ["qwen3-4b", "qwen3-8b", "llama-3.1-8b"])
def test_a_round_is_near_the_sum_of_both_floors(pair):
    assert ratio(pair, "round")[0] <= 1.15


def test_a_round_with_convolutions_and_selector_is_as_near():
    found, moved = ratio("qwen3-4b", "round", kind="dflash2")
    assert found <= 1.03
    assert moved <= 1.013 * ratio("qwen3-4b", "round")[1]


@pytest.mark.parametrize("pair", ["qwen3-8b", "llama-3.1-8b"])
def test_larger_targets_verify_near_their_floor(pair):
    assert ratio(pair, "verify")[0] <= 1.10


def test_recurrent_states_are_read_and_written_once_in_place():
    folder = str(CONFIGS / "qwen3.5-4b")
    model = aot.abstract_pair(
        *load_configs(folder, f"{folder}-dflash", None, 4), capacity=CONTEXT, cache="paged"
    )
    assert {spec.kind for spec in model.pair.target.specs} == {"recurrent", "attention"}
    compiled = aot.compile_step(model, "round")
    assert not forbidden(compiled.hlo) and not compiled.unaliased
    assert not re.search(r" (while|sort)\(", compiled.hlo)
    scattered = re.findall(r"= \w+\[([\d,]*)\]\S* scatter\(", compiled.hlo)
    assert set(scattered) <= {"16,32"}  # the angles of a rotation that has three parts
    floor = floor_of(model.pair, model.params, CONTEXT).round
    assert 0.98 * floor < compiled.traffic_bytes <= 1.05 * floor


@pytest.mark.parametrize("step", ["draft", "round"])
def test_no_matrix_of_odd_width_is_turned_round(step):
    folder = str(CONFIGS / "gpt-oss-20b")
    model = aot.abstract_pair(
        *load_configs(folder, f"{folder}-dflash", None, 2), capacity=CONTEXT, cache="paged"
    )
    matrices = {shape.shape for shape in model.params.values() if len(shape.shape) == 2}
    assert {(201088, 2880), (4096, 2880)} <= matrices
    compiled = aot.compile_step(model, step)
    copies = re.findall(r"= bf16\[(\d+),(\d+)\]\S* (?:copy|transpose)\(", compiled.hlo)
    assert not {(int(out), int(width)) for out, width in copies} & matrices
    floor = getattr(floor_of(model.pair, model.params, CONTEXT), step)
    assert compiled.traffic_bytes <= 1.10 * floor
