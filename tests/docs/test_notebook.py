"""The notebook runs from top to bottom in a new kernel."""

import importlib.util
import subprocess
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from support import ROOT

PATH = ROOT / "examples/dflash.ipynb"


def test_it_is_committed_without_outputs():
    book = nbformat.read(PATH, as_version=4)
    nbformat.validate(book)
    assert not any(cell.get("outputs") or cell.get("execution_count") for cell in book.cells)


def begin(**settings):
    first, second = [
        cell.source for cell in nbformat.read(PATH, as_version=4).cells if cell.cell_type == "code"
    ][:2]
    scope = {}
    exec(first, scope)
    exec(second, scope | settings)


@pytest.mark.parametrize("folder", ["examples", ".", "docs/results"])
def test_it_finds_its_repository_from_wherever_it_is_opened(folder, monkeypatch):
    monkeypatch.setattr(subprocess, "run", None)  # nothing is cloned or installed
    monkeypatch.chdir(ROOT / folder)
    begin()
    assert Path.cwd() == ROOT
    begin()  # a cell that is run twice
    assert Path.cwd() == ROOT


@pytest.mark.parametrize(("pip", "start"), [(True, "-m pip install -q"), (False, "uv pip install --python")])
def test_opened_alone_it_clones_its_repository_once_and_installs_it(pip, start, monkeypatch, tmp_path):
    ran = []

    def run(command, check):
        ran.append(" ".join(command))
        Path("torch-dflash/data/train/prompts").mkdir(parents=True, exist_ok=True)

    lacking = {"torch_dflash", "libtpu"} | ({"pip"} if not pip else set())
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name in lacking else name)
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit, match="Set REPOSITORY"):
        begin()
    for _ in range(2):
        monkeypatch.chdir(tmp_path)  # as a kernel that is started again
        begin(REPOSITORY="place")
        assert Path.cwd() == tmp_path / "torch-dflash"
    assert ran[0].startswith("git clone") and "place torch-dflash" in ran[0] and len(ran) == 3
    assert start in ran[1] and ran[1] == ran[2]


@pytest.mark.slow
@pytest.mark.network
def test_it_runs(tmp_path):
    book = nbformat.read(PATH, as_version=4)
    (settings,) = (cell for cell in book.cells if "parameters" in cell.metadata.get("tags", ()))
    settings.source += f"\nPROMPTS, EPOCHS = 12, 1\nOUT = {str(tmp_path)!r}"
    NotebookClient(book, timeout=900, resources={"metadata": {"path": str(PATH.parent)}}).execute()
    said = "".join(part.get("text", "") for cell in book.cells for part in cell.get("outputs", ()))
    assert "same text" in said and "trained here:" in said and "<|im_end|>" not in said
