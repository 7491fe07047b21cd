"""What is built holds what is imported and read, and nothing of a used checkout besides."""

from __future__ import annotations

import tomllib

import pytest
from support import ROOT

BUILD = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]


def included(folder):
    return {
        path
        for pattern in BUILD["include"]
        for path in folder.glob(pattern.removeprefix("/"))
        if path.is_file()
    }


def test_what_is_imported_and_read_is_built():
    built = included(ROOT)
    for package in ("torch_dflash", "jax_bridge"):
        assert {*(ROOT / package).rglob("*.py")} <= built and ROOT / package / "py.typed" in built
    assert {
        ROOT / "torch_dflash/published/pairs.json",
        ROOT / "docs/acceptance.svg",
        ROOT / "LICENSE",
    } <= built
    (weights,) = (ROOT / "torch_dflash/assets").rglob("*.safetensors")
    assert {*weights.parent.iterdir()} <= built


@pytest.mark.parametrize(
    "stray",
    [
        ".hypothesis/examples/1",
        ".ci/run",
        ".env",
        "data/train/prompts/gsm8k_train.jsonl.gz",
        "docs/results/quickstart_cpu.json",
        "examples/.ipynb_checkpoints/dflash-checkpoint.ipynb",
        "examples/run/fit/drafter/model.safetensors",
        "run/fit/state.pt",
        "torch_dflash/assets/another/model.safetensors",
        "torch_dflash/checkpoint.safetensors",
    ],
)
def test_what_else_a_checkout_holds_is_not(stray, tmp_path):
    path = tmp_path / stray
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert not included(tmp_path)
