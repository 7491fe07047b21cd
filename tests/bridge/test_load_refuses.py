"""What `jax_bridge.load` refuses before anything is looked up or read: each by its name, with the fix."""

from pathlib import Path

import jax
import numpy as np
import pytest
import torch
from support.refusals import refuses

import jax_bridge as jb
from jax_bridge.checkpoints import load as loading
from torch_dflash.storage import weight_files


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", ["is damaged", "Expecting", "fetch it again"]),
        ("[]", ["no weight_map", "fetch it again"]),
        ("{}", ["no weight_map", "fetch it again"]),
        ('{"weight_map": {"a": 1}}', ["no weight_map", "fetch it again"]),
        ('{"weight_map": {"a": "b"}}', ["no metadata", "add"]),
    ],
)
def test_a_damaged_index_is_named(tmp_path, monkeypatch, text, words):
    monkeypatch.setattr(weight_files, "cached_file", lambda folder, name, **given: found.get(name))
    index = tmp_path / "model.safetensors.index.json"
    found = {index.name: str(index)}
    index.write_text(text)
    with refuses(ValueError, str(index), *words):
        weight_files.find_files(str(tmp_path))


@pytest.fixture
def no_hub(monkeypatch):
    """Nothing may be looked up before it is refused."""
    monkeypatch.setattr(loading, "_read_config", lambda *args: pytest.fail("looked up before it was refused"))


@pytest.mark.parametrize(
    "path", ["/tmp/nowhere/at/all", "./nowhere", "nowhere/", "a/b/c", "~/nowhere", "", __file__]
)
def test_a_path_that_is_no_directory_is_no_hub_id(no_hub, path):
    with refuses(FileNotFoundError, f"path_or_id={path!r}: no such directory", "hub id"):
        jb.load(path)


def test_a_path_object_is_no_hub_id(no_hub, tmp_path):
    for path in (tmp_path / "nowhere", Path("owner/name")):
        with refuses(FileNotFoundError, f"path_or_id='{path}': no such directory", "as a string"):
            jb.load(path)


def test_what_is_neither_path_nor_id(no_hub):
    for given in (None, 3, b"/tmp", object):
        with refuses(TypeError, f"path_or_id={given!r}", "hub id"):
            jb.load(given)


@pytest.mark.parametrize("dtype", ["float32", np.float32, torch.int8, torch.float64, torch.float8_e4m3fn])
def test_types_that_weights_are_not_kept_in(no_hub, tmp_path, dtype):
    with refuses(TypeError, f"dtype={dtype!r}", "torch.float32, torch.bfloat16, torch.float16, or None"):
        jb.load(tmp_path, dtype=dtype)


def test_meshes_that_are_none(tmp_path):
    with refuses(TypeError, "mesh=(1, 2)", "Mesh"):
        jb.load(tmp_path, mesh=(1, 2))
    with refuses(ValueError, "('data',)", "'model'"):
        jb.load(tmp_path, mesh=jax.make_mesh((1,), ("data",)))
