"""Rounds of every drafting method, compiled for a v6e: each near the floor of its own bytes."""

import json
import runpy
from functools import lru_cache

import pytest
import torch
from support import ROOT

from jax_bridge.aot.methods import derive_rounds
from torch_dflash.cli.loading import load_configs

CONFIGS = ROOT / "benchmarks/configs"
pytestmark = pytest.mark.aot


@lru_cache
def rounds() -> dict[str, dict]:
    """The figures of each method on two of Qwen3-4B's layers."""
    made = runpy.run_path(str(ROOT / "benchmarks/methods_aot.py"))
    target, drafter = load_configs(str(CONFIGS / "qwen3-4b"), str(CONFIGS / "qwen3-4b-dflash"), None, 2)
    names = "plain", "eagle3, 2 drafts", "eagle3, 5 drafts", "medusa", "lookahead"
    with torch.device("meta"):
        drafters = {name: made["METHODS"][name](target, drafter) for name in names}
    return derive_rounds(target, drafters, context=4096, topology="v6e:2x2", status=print)


def test_every_round_is_near_its_own_floor():
    for name, one in rounds().items():
        assert 0.97 * one["floor_bytes"] < one["round_bytes"] <= 1.1 * one["floor_bytes"], name


def test_passes_of_eagle3_are_counted_trip_by_trip():
    """Each further draft reads the drafter and its head once more; a loop that is counted once would not."""
    few, many = (rounds()[f"eagle3, {drafts} drafts"] for drafts in (2, 5))
    moved, least = (many[name] - few[name] for name in ("round_bytes", "floor_bytes"))
    assert least > 0.2 * few["floor_bytes"] and moved == pytest.approx(least, rel=0.1)


def test_recorded_rounds_are_near_their_floors():
    found = json.loads((ROOT / "docs/results/compare/methods_aot.json").read_text())["rounds"]
    for places in found.values():
        for methods in places.values():
            assert all(one["round_bytes"] <= 1.1 * one["floor_bytes"] for one in methods.values())
