"""Builds hold all imported and read files, and no leftovers; bounds and addresses are stated."""

import os
import re
import runpy
import shutil
import subprocess
import sys
import tomllib
from types import SimpleNamespace

import pytest
from packaging.requirements import Requirement
from support import ROOT

import torch_dflash as td

PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
BUILD, PROJECT = PYPROJECT["tool"]["hatch"]["build"], PYPROJECT["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
FOLDERS = ".github", "benchmarks", "docs", "examples", "jax_bridge", "make", "tests", "torch_dflash"


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
        ROOT / "torch_dflash/assets/tested.txt",
        ROOT / "torch_dflash/published/pairs.json",
        ROOT / "docs/acceptance.svg",
        ROOT / "LICENSE",
    } <= built
    (weights,) = (ROOT / "torch_dflash/assets").rglob("*.safetensors")
    assert {*weights.parent.iterdir()} <= built


@pytest.mark.parametrize(
    "stray",
    (
        ".hypothesis/examples/1 .ci/run .env data/train/prompts/gsm8k_train.jsonl.gz "
        "docs/results/quickstart_cpu.json examples/.ipynb_checkpoints/dflash-checkpoint.ipynb "
        "examples/run/fit/drafter/model.safetensors run/fit/state.pt "
        "torch_dflash/assets/another/model.safetensors torch_dflash/checkpoint.safetensors"
    ).split(),
)
def test_what_else_a_checkout_holds_is_not(stray, tmp_path):
    path = tmp_path / stray
    path.parent.mkdir(parents=True, exist_ok=True)
    path.touch()
    assert not included(tmp_path)


def test_every_dependency_has_a_lower_bound_and_torchax_both():
    lowest = runpy.run_path(str(ROOT / "make/lowest.py"))["lowest"]()
    stated = [Requirement(line) for line in PROJECT["dependencies"]]
    assert {one.name for one in stated} <= set(lowest)
    bounds = {one.name: {bound.operator for bound in one.specifier} for one in stated}
    assert bounds.pop("torchax") == {">=", "<="} and {*map(frozenset, bounds.values())} == {frozenset({">="})}


def test_what_messages_install_is_on_an_index_and_of_their_extra():
    """The package itself is on no index, so a message names the packages of its extra."""
    extras = {
        "torch_dflash/cli/tpu.py": "tpu", "torch_dflash/cli/outputs.py": "demo",
        "torch_dflash/demo/target.py": "demo", "torch_dflash/grammars/vocabulary.py": "grammar",
        "torch_dflash/train/fit/log.py": "train",
        "torch_dflash/server/__init__.py": "serve", "jax_bridge/aot/shapes.py": "tpu",
        "examples/09_compile_for_a_tpu.py": "tpu", "examples/dflash.ipynb": "tpu",
    }  # fmt: skip
    shown = [*(ROOT / "examples").glob("*.*")]
    shown += [path for package in ("torch_dflash", "jax_bridge") for path in (ROOT / package).rglob("*.py")]
    for path in shown:
        name, text = path.relative_to(ROOT).as_posix(), path.read_text()
        assert not re.search(r"pip install [^\n]*torch-dflash(?![^\n]* @ )", text), name
        named = re.findall(r"pip install '?([\w\[\]]+)", text)
        brought = [
            line.partition(">=")[0] for line in PROJECT["optional-dependencies"].get(extras.pop(name, ""), [])
        ]
        if brought:
            assert named and {*named} <= {*brought}, name
    assert not extras


def test_the_repository_has_one_address_that_few_files_repeat():
    """A move changes pyproject.toml and these four files; the site and an index read pyproject.toml."""
    suffixes, named = {".cff", ".ipynb", ".md", ".py", ".sh", ".toml", ".yaml", ".yml"}, {}
    for path in [*ROOT.iterdir(), *(path for folder in FOLDERS for path in (ROOT / folder).rglob("*"))]:
        if path.is_file() and path.suffix in suffixes:
            for address in re.findall(r"github\.com/[\w.-]+/torch-dflash\b", path.read_text()):
                named.setdefault(f"https://{address}", set()).add(str(path.relative_to(ROOT)))
    assert named == {
        REPOSITORY: {"CITATION.cff", "README.md", "docs/installation.md", "docs/vllm.md", "pyproject.toml"}
    }
    citation = (ROOT / "CITATION.cff").read_text()
    assert "The torch-dflash authors" in citation and f"version: {td.__version__}" in citation


def test_an_index_gets_absolute_links(monkeypatch):
    hatchling = SimpleNamespace(MetadataHookInterface=object)  # lies in the environment of a build alone
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", hatchling)
    absolute = runpy.run_path(str(ROOT / "make/index_readme.py"))["absolute"]
    text = absolute((ROOT / "README.md").read_text(), REPOSITORY)
    links = re.findall(r"\]\(([^)]*)\)", text)
    assert len(links) > 10 and all(link.startswith(("https://", "#")) for link in links)
    assert f"({REPOSITORY}/raw/main/docs/acceptance.svg)" in text


def make(*line: str) -> subprocess.CompletedProcess[str]:
    """Runs make as a user's first make: the variables of a make around the tests are removed."""
    outer = ("PYTHON", "TORCH", "TRANSFORMERS", "CONSTRAINTS", "MAKEFLAGS", "MAKELEVEL")
    clean = {key: value for key, value in os.environ.items() if key not in outer}
    line = ("make", "--no-print-directory", *line)
    return subprocess.run(line, cwd=ROOT, env=clean, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("options", "name"),
    [
        ([], ".venv"),
        (["PYTHON={same}"], ".venv"),
        (["PYTHON={other}"], ".venv-9.7"),
        (["TORCH=torch"], ".venv-{version}-torch"),
        (["TRANSFORMERS=transformers<5.20,>=5.15.*"], ".venv-{version}-transformers-5.20-5.15."),
        (["CONSTRAINTS=build/lowest.txt"], ".venv-{version}-lowest"),
    ],
)
def test_each_interpreter_and_set_of_versions_has_its_environment(options, name, tmp_path):
    if not shutil.which("make"):
        pytest.skip("no make")
    other = tmp_path / "python9"
    other.write_text("#!/bin/sh\necho 9.7\n")
    other.chmod(0o755)
    version = "{}.{}".format(*sys.version_info)
    line = ["shown", "--eval", "shown: ; @echo $(VENV)", f"DEFAULT_PYTHON={sys.executable}"]
    done = make(*line, *(one.format(same=sys.executable, other=other) for one in options))
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [name.format(version=version)]


def test_make_refuses_an_old_interpreter_before_it_installs_anything(tmp_path):
    if not shutil.which("make"):
        pytest.skip("no make")
    old = tmp_path / "python3.10"
    old.write_text("#!/bin/sh\necho 3.10\n")
    old.chmod(0o755)
    done = make("-n", "demo", f"PYTHON={old}")
    assert done.returncode == 2 and not done.stdout
    assert "Python 3.10 is too old; name 3.11 or later" in done.stderr


PYTHONS = {
    "the path": "path/python3.12", "pyenv": "home/.pyenv/versions/3.12.1/bin/python",
    "uv": "home/.local/share/uv/python/cpython-3.12.3-linux-x86_64-gnu/bin/python",
    "VLLM_PYTHON": "own/python", "nowhere": "own/python", "VLLM_PYTHON of another version": "own/python3.13",
}  # fmt: skip


@pytest.mark.parametrize("where", PYTHONS)
def test_vllms_environment_takes_a_python_3_12_that_starts_or_names_the_option(where, tmp_path):
    """A pyenv shim on the path starts nothing unless its version is chosen."""
    shim, own = tmp_path / "path/python3.12", tmp_path / PYTHONS[where]
    given = str(own) if "VLLM_PYTHON" in where else ""
    for path, status in ((shim, 127), (own, int("another" in where))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"#!/bin/sh\nexit {status}\n")
        path.chmod(0o755)
    paths = {"PATH": f"{shim.parent}:/usr/bin:/bin", "HOME": str(tmp_path / "home"), "VLLM_PYTHON": given}
    command = ("sh", ROOT / "make/vllm/python.sh")
    done = subprocess.run(command, env=paths, capture_output=True, text=True, check=False)
    if where == "nowhere" or "another" in where:
        assert done.returncode == 1 and not done.stdout
        assert done.stderr.startswith(f"VLLM_PYTHON={given}: vLLM for TPU needs Python 3.12; name one, as in")
    else:
        found = shutil.which(done.stdout.strip(), path=paths["PATH"])
        assert done.returncode == 0 and found == str(own), done


@pytest.mark.parametrize(("tag", "status"), [(f"v{td.__version__}", 0), ("v9.9.9", 1)])
def test_a_release_compares_its_tag_with_the_version(tag, status):
    command = re.search(r"run: (grep .*)", (ROOT / ".github/workflows/release.yml").read_text())
    assert command
    done = subprocess.run(["sh", "-c", command[1]], cwd=ROOT, env={**os.environ, "GITHUB_REF_NAME": tag})
    assert done.returncode == status
