"""``torch-dflash list``: a table, JSON, and the part of both that the hub's cache holds."""

import json
import shutil

import pytest
from support.hub_cache import HubCache

import torch_dflash as td
from torch_dflash.cli import main
from torch_dflash.cli.list_pairs import HEADS
from torch_dflash.integrations.vllm.refusals import FAMILIES


@pytest.fixture
def hub(tmp_path):
    (tmp_path / "hub").mkdir()
    return HubCache(tmp_path / "hub")


def test_the_table_has_every_pair_and_says_what_is_unknown(capsys):
    assert main(["list"]) == 0
    head, *lines = capsys.readouterr().out.splitlines()
    assert tuple(head.split()) == HEADS and len(lines) == len(td.checkpoints)
    by_name = {line.split()[0]: line.split() for line in lines}
    assert by_name["qwen3-4b"] == [
        "qwen3-4b", "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16", "DFlash", "z-lab", "16",
        "1,9,17,25,33", "yes",
    ]  # fmt: skip
    assert by_name["glm-5.1"][1:] == "(GLM-5.1) z-lab/GLM-5.1-FP8-DFlash DFlash z-lab ? ? yes".split()
    assert by_name["qwen3.5-27b"][-1] == "yes"
    starts = {line.index(line.split()[1]) for line in [head, *lines]}
    assert len(starts) == 1  # columns are aligned


def test_a_part_of_a_name_chooses(capsys):
    assert main(["list", "Kimi"]) == 0
    names = [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]
    assert names and all("kimi" in name for name in names)
    assert main(["list", "nothing-like-it"]) == 2
    assert "no pair has that in its name" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("Qwen/Qwen3-8B", "qwen3-8b"),
        ("z-lab/Qwen3-8B-DFlash-b16", "qwen3-8b"),
        ("Llama-3.1-8B-Instruct", "llama-3.1-8b"),
        ("Qwen3_8B", "qwen3-8b"),
        ("Qwen/Qwen3.5-9B", "qwen3.5-9b"),  # its row has no hub id of the target
    ],
)
def test_a_model_is_found_by_its_hub_id(capsys, text, name):
    assert main(["list", text]) == 0
    assert name in [line.split()[0] for line in capsys.readouterr().out.splitlines()[1:]]


def test_where_nothing_decodes_that_is_said(capsys):
    assert main(["list", "--decodes", "xpress"]) == 2
    out, err = capsys.readouterr()
    assert not out and "xpress: no such pair decodes here; leave --decodes out" in err


def test_json_has_every_field_its_source_and_what_is_unknown(capsys):
    assert main(["list", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert len(rows) == len(td.checkpoints)
    kimi = rows["kimi-k2.5"]
    assert kimi["mask_token_id"] == 163838 and "vllm/pull/39930" in kimi["sources"]["mask_token_id"]
    assert kimi["decodes"] is True and rows["qwen3-4b"]["decodes"] is True
    assert rows["qwen3-8b-jetspec"]["decodes"] is False and "JetSpec" in rows["qwen3-8b-jetspec"]["why_not"]
    assert kimi["decoded"] is True and rows["qwen3-4b"]["decoded"] is True
    assert rows["gpt-oss-120b"]["target_layer_ids"] is None
    assert "target_layer_ids" in rows["gpt-oss-120b"]["unknown"]


def test_each_pair_is_said_to_be_taken_by_the_vllm_plug_in_or_why_not(capsys):
    assert main(["list", "--vllm"]) == 0
    told = capsys.readouterr()
    head, *lines = told.out.splitlines()
    assert tuple(head.split()) == (*HEADS, "vllm") and len(lines) == len(td.checkpoints)
    by_name = {line.split()[0]: line[head.index("vllm") :] for line in lines}
    taken = sorted(name for name, why in by_name.items() if why == "yes")
    assert {"qwen3-8b-dspark", "gpt-oss-20b", "qwen3-4b-dflash2", "gemma-4-12b"} <= set(taken)
    assert by_name["qwen3.5-27b"] == "a state of the target that rejected drafts have changed"
    assert by_name["kimi-k2.5"] == "latent attention in the target"
    assert by_name["qwen3-8b-xpress"] == "a drafter of kind XPress"
    assert f"takes {len(taken)} of {len(lines)}." in told.err
    assert main(["list", "--vllm", "--json", "muse-glimmer"]) == 0
    why = "a target with images that was not compared"
    rows = json.loads(capsys.readouterr().out)
    assert {(row["vllm"], row["vllm_why_not"]) for row in rows} == {(False, why)}


def test_every_compared_family_has_a_verdict_of_the_vllm_plug_in():
    compared = {row.family for row in td.checkpoints if row.decoded}
    assert compared == set(FAMILIES)


def check(hub, *more):
    return main(["list", "--check", "--cache-dir", str(hub.root), *more])


def test_what_the_cache_holds_is_loaded_and_compared_and_the_rest_is_named(hub, capsys):
    hub.add_target("Qwen/Qwen3-4B")
    hub.add_drafter("z-lab/Qwen3-4B-DFlash-b16")
    assert check(hub) == 0
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0] == "qwen3-4b: loads and fits"
    assert (
        lines[-1]
        == f"checked 1 of {len(td.checkpoints)} pairs; {len(td.checkpoints) - 1} are not in the cache."
    )
    assert "  num_target_layers=4 in its config, 36 by github.com/sgl-project/SpecForge" in out
    assert "block_size=" not in out  # as the row says
    assert "not in the cache: qwen3-8b, qwen3-coder-30b-a3b" in err and "qwen3-4b," not in err


def test_without_the_targets_config_the_pair_is_not_compared_and_that_is_said(hub, capsys):
    hub.add_drafter("z-lab/Qwen3-4B-DFlash-b16", num_target_layers=9)
    assert check(hub, "qwen3-4b") == 0
    out = capsys.readouterr().out
    assert "qwen3-4b: loads\n" in out
    assert "the config of Qwen/Qwen3-4B is not in the cache: the pair was not compared." in out
    hub.add_target("Qwen/Qwen3-4B")
    assert check(hub, "qwen3-4b") == 1
    assert "qwen3-4b: num_target_layers=9 in the drafter, but the target has 4" in capsys.readouterr().out


def test_one_that_was_fetched_in_part_is_a_problem(hub, capsys):
    folder = hub.add_drafter("z-lab/Qwen3-8B-DFlash-b16")
    (folder / "model.safetensors").unlink()
    assert check(hub, "--json") == 1
    found = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert found["qwen3-8b"]["cached"] and "model.safetensors" in found["qwen3-8b"]["problem"]
    assert not found["qwen3-4b"]["cached"] and found["qwen3-4b"]["problem"] is None


def no_snapshot(folder):
    shutil.rmtree(folder.parent)


def no_blob(folder):
    """The links of the snapshot lead nowhere, as after a user deleted the hub's files by hand."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../blobs/gone")


def no_object(folder):
    (folder / "config.json").write_text("[]")


@pytest.mark.parametrize("damage", [no_snapshot, no_blob, no_object])
def test_one_that_is_damaged_is_a_problem_and_the_rest_is_checked(hub, capsys, damage):
    damage(hub.add_drafter("z-lab/Qwen3-8B-DFlash-b16"))
    hub.add_drafter("z-lab/Qwen3-4B-DFlash-b16")
    assert check(hub, "qwen3") == 1
    out = capsys.readouterr().out
    assert "qwen3-8b: loads" not in out and "qwen3-8b: " in out and "fetch it again" in out
    assert "qwen3-4b: loads" in out and "checked 2 of" in out


def test_an_empty_cache_and_none_at_all(hub, capsys, tmp_path):
    assert check(hub) == 0
    assert (
        capsys.readouterr().out
        == f"checked 0 of {len(td.checkpoints)} pairs; {len(td.checkpoints)} are not in the cache.\n"
    )
    assert main(["list", "--check", "--cache-dir", str(tmp_path / "nowhere")]) == 2
    assert "no hub cache could be read" in capsys.readouterr().err


@pytest.mark.parametrize(
    "given, why",
    [(["--cache-dir", "x"], "it is for --check"), (["--vllm", "--check"], "leave one of them out")],
)
def test_options_that_ask_otherwise_are_refused(given, why, capsys):
    assert main(["list", *given]) == 2
    assert why in capsys.readouterr().err
