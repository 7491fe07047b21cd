"""docs/results: no text of a family is another's, and the library knows the tested classes."""

import json
import runpy

import pytest
import torch
from support import ROOT

from torch_dflash.targets import tested

TABLES = runpy.run_path(str(ROOT / "benchmarks/family_tables.py"))
RESULTS = json.loads((ROOT / "docs/results/families.json").read_text())
MULTIMODAL = json.loads((ROOT / "docs/results/multimodal.json").read_text())
FAMILIES = RESULTS["families"] | MULTIMODAL["families"]
VERDICTS = {name: TABLES["verdict"](one) for name, one in FAMILIES.items()}


def test_no_text_is_another_models():
    runs = [(name, run["outcome"]) for name, one in FAMILIES.items() for run in one["runs"].values()]
    assert not [(name, outcome) for name, outcome in runs if outcome in ("differs", "crash")]
    assert sum(verdict == "equal" for verdict in VERDICTS.values()) > 90


def test_the_tested_classes_are_those_of_equal_text():
    listed = (ROOT / "torch_dflash/assets/tested.txt").read_text()
    assert TABLES["tested"](RESULTS, MULTIMODAL) == listed
    named = {f"attention {name}" for name in tested.TESTED}
    named |= {f"recurrent {name}" for name in tested.TESTED_RECURRENT}
    assert named | {f"transformers {tested.WITH}"} == {*listed.splitlines()}


def test_every_multimodal_class_that_runs_was_tapped():
    ran = [run for one in MULTIMODAL["families"].values() for run in one["runs"].values()]
    equal = [run for run in ran if run["outcome"] == "equal"]
    assert len(equal) > 80 and all("dflash" in run["proposers"] for run in equal)
    assert {run["outcome"] for run in ran} == {"equal", "refused"}


def test_every_tested_class_is_known_as_such():
    """No tested class counts as patched: all its files are transformers' own."""
    configs = runpy.run_path(str(ROOT / "benchmarks/family_configs.py"))
    for name, one in FAMILIES.items():
        recurrent = "recurrent" in one
        known = tested.TESTED_RECURRENT if recurrent else tested.TESTED
        if VERDICTS[name] == "equal" and one["model"] in known:
            with torch.device("meta"):
                assert tested.is_tested(configs["build"](name), recurrent), name


def test_texts_vary():
    weak = [name for name, one in FAMILIES.items() if VERDICTS[name] == "equal" and one["distinct"] < 3]
    assert len(weak) <= 3, weak


@pytest.mark.parametrize("runtime", ["eager", "xla"])
def test_the_four_families_of_the_readme_run_everywhere(runtime):
    for name in ("llama", "qwen2", "qwen3", "gpt_oss"):
        for cache in ("static", "paged"):
            assert FAMILIES[name]["runs"][f"{runtime} {cache}"]["outcome"] == "equal", (name, cache)


def test_a_worse_outcome_is_the_verdict():
    run = {"outcome": "equal", "proposers": ["plain"]}
    family = {
        "model": "A",
        "distinct": 9,
        "runs": {"eager static": run, "eager paged": run | {"outcome": "crash"}},
    }
    assert TABLES["verdict"](family) == "crash"
    family["runs"]["eager paged"] = run | {"outcome": "refused"}
    assert TABLES["verdict"](family) == "equal"
    assert "| a | A | equal | refused | - | - | lookup |" in TABLES["tables"]({"a": family})
