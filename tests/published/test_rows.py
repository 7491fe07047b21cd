"""The published pairs: each field has a source, families decode as said, and sizes are the published ones."""

from __future__ import annotations

import dataclasses
import json
import re
from importlib.resources import files
from pathlib import Path

import pytest
from accelerate import init_empty_weights
from support import ROOT

import torch_dflash as td
from torch_dflash.proposers.checkpoints import drafter_of
from torch_dflash.proposers.dflash.config import default_target_layer_ids
from torch_dflash.published import rows
from torch_dflash.published.rows import UNSOURCED

ROWS = {row.name: row for row in td.checkpoints}
DATA = json.loads((files("torch_dflash.published") / "pairs.json").read_text())
FAMILIES = {
    name: one
    for file in ("multimodal", "families")
    for name, one in json.loads((ROOT / f"docs/results/{file}.json").read_text())["families"].items()
}
# Shapes that no source tells. Of the sizes that they give, the test below says whether they can be right.
ASSUMED = {
    # heads and MLP of Qwen3-8B's drafter, not of Llama
    "llama-3.1-8b": {"intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "kimi-k2.5": {"intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 8},
    # what the card's recipe does not give: it says eight layers and other taps
    "qwen3-8b-dflash2": {
        "num_hidden_layers": 5, "target_layer_ids": [1, 9, 17, 25, 33], "hidden_size": 4096,
        "vocab_size": 151936, "intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "qwen3-4b-dflash2-mgoin": {
        "intermediate_size": 9728, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
}  # fmt: skip
PARAMETERS = {
    "qwen3-4b": 537_427_200, "qwen3-8b": 1_048_626_432, "qwen3-coder-30b-a3b": 473_995_264,
    "llama-3.1-8b": 1_048_626_432, "gpt-oss-20b": 784_767_104, "kimi-k2.5": 3_479_277_056,
    "gemma-4-31b": 1_535_967_488, "qwen3.8-27b-dflash2": 1_924_404_480, "beam-1.0": 1_927_484_672,
    "muse-glimmer-30b-dflash2": 2_772_159_744, "muse-glimmer-30b-assistant": 2_555_985_152,
    "qwen3-8b-dflash2": 1_169_573_120, "qwen3-4b-dflash2-mgoin": 632_360_192,
    "lfm2.5-1.2b-dspark": 295_725_953, "lfm2.5-2.6b-dspark": 327_707_521, "lfm2.5-8b-a1b-dspark": 327_707_521,
}  # fmt: skip
BYTES = {"GB": 1e9, "GiB": 2**30}


def built(row):
    """Its drafter on the meta device, in z-lab's fields."""
    given = {
        "num_hidden_layers": row.num_hidden_layers, "block_size": row.block_size or 8,
        "target_layer_ids": list(row.target_layer_ids or ()), "mask_token_id": row.mask_token_id,
        "num_target_layers": row.num_target_layers, "head_dim": 128,
    }  # fmt: skip
    made = td.DFlash2Config if row.kind == "DFlash2" else td.DFlashConfig
    shape = given | {"sliding_window": None} | (row.shape or {}) | ASSUMED.get(row.name, {})
    shape = {"layer_types": ["full_attention"] * shape["num_hidden_layers"]} | shape
    if "sliding_attention" not in shape["layer_types"]:
        shape["sliding_window"] = None  # which of its layers slide is not told, nor does it change a size
    with init_empty_weights(include_buffers=False):
        return drafter_of(made(**shape))


def matches(size: str, parameters: int, tensors: int) -> bool:
    """Whether a drafter has the published ``size``, to its last digit."""
    about, number, unit = re.fullmatch(r"(about )?([\d.,]+) (.+)", size).groups()
    said = float(number.replace(",", ""))
    digit = 10.0 ** -len(number.partition(".")[2]) * (1 if about else 0.5)
    if unit == "tensors":
        return said == tensors
    if unit == "parameters":
        return said == parameters
    have = parameters / 1e9 if unit == "B parameters" else 2 * parameters / BYTES[unit]
    return abs(have - said) <= digit * 1.0001


@pytest.mark.parametrize("name", PARAMETERS)
def test_a_published_drafter_has_its_published_size(name):
    row, drafter = ROWS[name], built(ROWS[name])
    parameters = sum(weight.numel() for weight in drafter.parameters())
    if row.layout == "LiquidAI":  # its confidence head, which is not read
        parameters += row.shape["hidden_size"] + row.shape["markov_rank"] + 1
    assert parameters == PARAMETERS[name]
    assert row.size is None or matches(row.size, parameters, len(drafter.state_dict())), (
        row.size,
        parameters,
    )
    if row.kind == "DFlash" and name != "gpt-oss-20b":
        assert len(drafter.state_dict()) == 11 * drafter.config.num_hidden_layers + 3


def test_a_size_is_compared_to_its_last_digit():
    assert matches("6.48 GiB", 3_479_277_056, 0) and not matches("6.48 GiB", 3_490_000_000, 0)
    assert matches("3.85 GB", 1_924_404_480, 0) and not matches("3.84 GB", 1_924_404_480, 0)
    assert matches("58 tensors", 0, 58) and not matches("58 tensors", 0, 57)
    assert not matches("1,169,573,120 parameters", 1_169_573_121, 0)


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        ("llama-3.1-8b", {"intermediate_size": 14336}),  # Llama's own
        ("kimi-k2.5", {"num_key_value_heads": 64}),  # Kimi's own
        ("qwen3-8b-dflash2", {"num_hidden_layers": 8}),  # the card's recipe
        ("qwen3-8b-dflash2", {"target_layer_ids": [3, 11, 19, 27, 35, 43]}),
    ],
)
def test_other_shapes_do_not_have_the_published_size(name, changes, monkeypatch):
    monkeypatch.setitem(ASSUMED, name, ASSUMED[name] | changes)
    drafter = built(ROWS[name])
    assert not matches(ROWS[name].size, sum(weight.numel() for weight in drafter.parameters()), 0)


def test_every_field_that_is_known_has_a_source_and_no_other_has():
    for row in td.checkpoints:
        known = {field for field in vars(row) if field not in UNSOURCED and getattr(row, field) is not None}
        assert known == set(row.sources), row.name
        assert not known & set(row.unknown)
        assert known | set(row.unknown) | set(UNSOURCED) == {one.name for one in dataclasses.fields(row)}
        assert (row.acceptance is None) == (row.measured is None), row.name
    used = {source for raw in DATA["pairs"] for source in raw["sources"]}
    assert used == set(DATA["sources"])  # none is left over, none missing


def test_no_field_is_misspelt_and_no_name_is_twice():
    assert len(ROWS) == len(td.checkpoints) == len(DATA["pairs"]) > 60
    for row in td.checkpoints:
        assert re.fullmatch(r"[a-z0-9.-]+", row.name)
        for one in (row.target, row.drafter):
            assert one is None or re.fullmatch(r"[\w.-]+/[\w.-]+", one), one


def test_taps_lie_in_their_targets_and_are_mostly_the_usual_ones():
    for row in td.checkpoints:
        taps, depth = row.target_layer_ids, row.num_target_layers
        assert taps is None or list(taps) == sorted(set(taps))
        if taps and depth:
            assert taps[-1] < depth
    usual = ("qwen3-4b", "llama-3.1-8b", "gpt-oss-20b", "kimi-k2.5", "gemma-4-31b", "qwen3.6-27b")
    for name in usual:
        row = ROWS[name]
        assert list(row.target_layer_ids) == default_target_layer_ids(
            row.num_target_layers, len(row.target_layer_ids)
        )


def test_whether_a_target_decodes_is_what_the_families_say():
    for name, said in DATA["families"].items():
        outcomes = {run["outcome"] for run in FAMILIES[name]["runs"].values()}
        assert said["decoded"] == ("equal" in outcomes), name
        assert ("why" in said) == (not said["decoded"]), name
    for row in td.checkpoints:
        assert row.decoded is DATA["families"].get(row.family, {}).get("decoded")
        assert row.decoded is not None or row.family not in FAMILIES
    assert {row.decoded for row in td.checkpoints} == {True, False, None}
    assert {
        ROWS[name].decoded for name in ROWS if name.startswith(("qwen3.5", "qwen3.6", "qwen3.8-27b"))
    } == {True}


def test_a_pair_decodes_only_if_its_drafter_drafts():
    assert ROWS["qwen3-8b-jetspec"].decoded is True
    assert ROWS["qwen3-8b-jetspec"].verdict == (False, "a drafter of kind JetSpec")
    dspark = ROWS["kimi-k2.6-dspark"]
    assert dspark.verdict == (False, "a drafter of kind DSpark in a layout that no public config shows")
    assert dataclasses.replace(dspark, layout="speculators").verdict == (True, None)
    assert ROWS["qwen3-4b"].verdict == (True, None)
    assert ROWS["qwen3.5-9b"].verdict == (True, None)
    assert ROWS["inkling-small-dspark"].verdict == (False, "several convolutions in one layer")


def test_the_share_counts_drafters_whose_weights_are_published():
    share = rows.share()
    assert share == rows.PublishedCounts(known=103, decodes=69, loads=64)
    assert str(share).startswith("103 published drafters are known: 69 decode here, 64 of them")
    held_back = {row.target_weights for row in td.checkpoints if row.verdict[0] and not row.loads}
    assert held_back == {"int4"}
    assert rows.share([ROWS["qwen3-4b"], ROWS["qwen3-8b-jetspec"]]) == rows.PublishedCounts(1, 1, 1)
    assert rows.share([ROWS["qwen2.5-0.5b-sample"]]) == rows.PublishedCounts(0, 0, 0)
    quantised = dataclasses.replace(ROWS["qwen3-4b"], target_weights="int4")
    assert rows.share([quantised]) == rows.PublishedCounts(1, 1, 0)


def test_every_drafter_is_listed_once():
    ids = [row.drafter for row in td.checkpoints if row.drafter is not None]
    assert len(set(ids)) == len(ids)
    assert len({row.name for row in td.checkpoints}) == len(td.checkpoints)


def test_rows_say_what_the_configs_of_this_repository_say():
    for name in ("qwen3-4b", "qwen3-8b", "qwen3-coder-30b-a3b", "llama-3.1-8b", "gpt-oss-20b"):
        config = td.DFlashConfig.from_pretrained(ROOT / f"benchmarks/configs/{name}-dflash")
        row = ROWS[name]
        for field in ("num_hidden_layers", "block_size", "num_target_layers", "mask_token_id"):
            assert getattr(config, field) == getattr(row, field), (name, field)
        assert config.target_layer_ids == list(row.target_layer_ids)
        for field, value in (row.shape | ASSUMED.get(name, {})).items():
            if field not in ("rope_theta", "rope_scaling"):
                assert getattr(config, field) == value, (name, field)


def test_rows_are_not_to_be_changed_and_the_wheel_has_their_file():
    with pytest.raises(dataclasses.FrozenInstanceError):
        td.checkpoints[0].block_size = 4
    assert len({*td.checkpoints}) == len(td.checkpoints)
    assert Path(str(files("torch_dflash.published") / "pairs.json")).parent == ROOT / "torch_dflash/published"
    wheel = (ROOT / "pyproject.toml").read_text().partition("[tool.hatch.build.targets.wheel]")[2]
    assert '"torch_dflash"' in wheel.partition("[tool")[0]
