"""A drafter's weights in shards, subfolders and next to an index are checked before loading."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.authors import SECOND
from support.published import publish, same_tensors
from support.refusals import refuses
from support.tiny import make_drafter, make_target
from transformers import PreTrainedModel

import torch_dflash as td
from torch_dflash.storage.weight_files import beside, find_files, read_checkpoint

INDEX = "model.safetensors.index.json"


@pytest.fixture
def sharded(tmp_path):
    tensors = publish(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    names = sorted(tensors)
    split(tmp_path, tensors, {name: f"model-{at % 3}.safetensors" for at, name in enumerate(names)})
    return tmp_path, tensors


def split(folder, tensors, places):
    for file in set(places.values()):
        (folder / file).parent.mkdir(exist_ok=True)
        part = {name: tensors[name] for name in tensors if places[name] == file}
        save_file(part, folder / file, metadata={"format": "pt"})
    (folder / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": places}))


def test_shards_and_shards_in_a_folder_below(sharded, tmp_path):
    folder, tensors = sharded
    same_tensors(td.load_drafter(folder), tensors)
    for file in folder.glob("model-*.safetensors"):
        file.unlink()
    split(folder, tensors, {name: f"parts/{name[0]}.safetensors" for name in tensors})
    same_tensors(td.load_drafter(folder), tensors)


def test_an_index_beside_the_one_file_it_names(tmp_path):
    tensors = publish(tmp_path)
    split(tmp_path, tensors, dict.fromkeys(tensors, "model.safetensors"))
    same_tensors(td.load_drafter(tmp_path), tensors)


def test_a_subfolder(sharded, tmp_path):
    folder, tensors = sharded
    (folder / "v2").mkdir()
    for file in [*folder.glob("*.json"), *folder.glob("*.safetensors")]:
        file.rename(folder / "v2" / file.name)
    same_tensors(td.load_drafter(folder, subfolder="v2"), tensors)
    with refuses(ValueError, "holds no *.safetensors", "pass subfolder='v2'"):
        td.DFlashDraftModel.from_pretrained(folder)
    for load in (td.load_drafter, td.DFlashDraftModel.from_pretrained):
        with refuses(OSError, str(folder), "subfolder='v3'"):
            load(folder, subfolder="v3")


def test_a_shard_that_is_not_there(sharded):
    folder, _ = sharded
    (folder / "model-1.safetensors").unlink()
    with refuses(FileNotFoundError, INDEX, "names model-1.safetensors", "not there", "fetch it again"):
        td.load_drafter(folder)


def test_a_tensor_that_the_index_names_and_no_shard_holds(sharded):
    folder, _ = sharded
    part = load_file(folder / "model-0.safetensors")
    lost = sorted(part)[0]
    del part[lost]
    save_file(part, folder / "model-0.safetensors", metadata={"format": "pt"})
    with refuses(ValueError, INDEX, f"{lost} is in model-0.safetensors", "none of its files holds it"):
        td.load_drafter(folder)


def test_a_tensor_that_two_shards_hold(sharded):
    folder, tensors = sharded
    twice = sorted(load_file(folder / "model-0.safetensors"))[0]
    other = load_file(folder / "model-1.safetensors") | {twice: torch.zeros_like(tensors[twice])}
    save_file(other, folder / "model-1.safetensors", metadata={"format": "pt"})
    with refuses(ValueError, twice, "model-0.safetensors", "model-1.safetensors", "remove one"):
        td.load_drafter(folder)


def test_files_beside_the_checkpoint_are_listed_and_not_left_unread(sharded):
    folder, tensors = sharded
    save_file({"norm.weight": tensors["norm.weight"]}, folder / "copy.safetensors")
    files, _ = find_files(folder)
    assert len(files) == 3 and [one.name for one in beside(files)] == ["copy.safetensors"]
    same_tensors(td.load_drafter(folder), tensors)  # all its tensors are read
    save_file({"mask": torch.ones(32)}, folder / "more.safetensors")
    with refuses(ValueError, "more.safetensors", "['mask']", "not read", "merge"):
        td.load_drafter(folder)


def test_every_tensor_is_found_whatever_file_it_lies_in(sharded):
    folder, tensors = sharded
    found = read_checkpoint(folder)
    assert {name: part.shape for name, part in found.items()} == {
        name: tuple(tensor.shape) for name, tensor in tensors.items()
    }
    assert len({part.file for part in found.values()}) == 3


SIZES = [
    ({"target_layer_ids": list(range(3)) * 400}, ["target_layer_ids", "fc.weight", "shape (32, 38400)"]),
    ({"vocab_size": 2**31 - 1}, ["vocab_size=2147483647", "predecessor_codebook", "2147483647, 12"]),
    ({"selector_rank": 10**6}, ["selector_rank=1000000", "hidden_projection", "1000000, 32"]),
    ({"conv_kernel_size": 10**6}, ["conv_kernel_size=1000000", "base_kernel"]),
    ({"conv_group_size": 16}, ["conv_group_size=16", "kernel_projection", "would have shape (8, 32)"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), SIZES)
def test_sizes_that_the_headers_do_not_have_are_refused_before_anything_is_allocated(
    tmp_path, monkeypatch, changes, words
):
    make_drafter(make_target("qwen3"), **SECOND).save_pretrained(tmp_path)
    raw = json.loads((tmp_path / "config.json").read_text())
    nested = {name: value for name, value in changes.items() if name in raw["dflash_config"]}
    raw = raw | changes | {"dflash_config": raw["dflash_config"] | nested}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    monkeypatch.setattr(PreTrainedModel, "from_pretrained", lambda *args, **given: pytest.fail("allocated"))
    with refuses(ValueError, *words, "different drafters"):
        td.load_drafter(tmp_path)


def test_a_kernel_projection_that_lies_the_other_way(tmp_path):
    make_drafter(make_target("qwen3"), **SECOND).save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "layers.0.attention_conv.kernel_projection.weight"
    stored[name] = stored[name].T.contiguous()
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with refuses(ValueError, name, "would have shape"):
        td.load_drafter(tmp_path)
