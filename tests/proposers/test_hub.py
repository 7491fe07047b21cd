"""A drafter goes to the hub with a card, and comes back from any place in a repository, offline too."""

import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from huggingface_hub import ModelCard
from support.published import publish
from support.refusals import refuses
from support.shell import python
from support.tiny import make_drafter, make_target
from transformers import AutoModel, AutoModelForCausalLM

import torch_dflash as td
from torch_dflash.proposers.checkpoint import hub


@pytest.fixture(scope="module")
def drafter():
    return make_drafter(make_target("qwen3"))


class Hub:  # the requests to the hub's API
    def __init__(self, there=()):
        self.there, self.calls, self.files = there, [], {}

    def __call__(self, **options):
        self.calls.append(("api", options))
        return self

    def create_repo(self, name, **options):
        self.calls.append(("create_repo", name, options))
        return SimpleNamespace(repo_id=f"me/{name}" if "/" not in name else name)

    def create_branch(self, name, **options):
        self.calls.append(("create_branch", name, options))

    def file_exists(self, name, file, **options):
        return file in self.there

    def upload_folder(self, folder_path, **options):
        self.calls.append(("upload_folder", options))
        self.files = {path.name: path.read_bytes() for path in Path(folder_path).iterdir()}
        return "commit"


def test_what_is_pushed_loads_again_and_has_a_card(drafter, monkeypatch, tmp_path):
    there = Hub()
    monkeypatch.setattr(hub, "HfApi", there)
    said = {"target": "some/target", "license": "apache-2.0", "acceptance": {"gsm8k": 3.14159}}
    said |= {"tags": ["tiny"]}
    call = {"token": "secret", "private": True, "revision": "v2", "create_pr": False, "commit_message": "why"}
    assert drafter.push_to_hub("me/mine", **said, **call) == "commit"
    assert there.calls[0] == ("api", {"token": "secret", "library_name": "torch-dflash"})
    assert ("create_repo", "me/mine", {"private": True, "exist_ok": True}) in there.calls
    assert ("create_branch", "me/mine", {"branch": "v2", "exist_ok": True}) in there.calls
    assert there.calls[-1][1]["revision"] == "v2" and there.calls[-1][1]["commit_message"] == "why"
    assert set(there.files) == {"config.json", "model.safetensors", "README.md"}
    for name, content in there.files.items():
        (tmp_path / name).write_bytes(content)
    again = td.DFlashDraftModel.from_pretrained(tmp_path)
    assert all(map(torch.equal, again.state_dict().values(), drafter.state_dict().values()))
    card = ModelCard(there.files["README.md"].decode())
    assert card.data.base_model == "some/target" and card.data.license == "apache-2.0"
    assert {"dflash", "tiny"} < set(card.data.tags)
    for words in (
        'load_drafter("me/mine"',
        'from_pretrained("some/target"',
        "| gsm8k | 3.14 |",
        f"| block size | {drafter.config.block_size}, ",
        f"| taps | {drafter.config.target_layer_ids}, ",
    ):
        assert words in card.text, words


@pytest.mark.parametrize("second", [False, True])
def test_the_cards_own_words_load_it(second, monkeypatch, tmp_path):
    sizes = {"selector_rank": 8, "selector_top_k": 4, "conv_group_size": 4} if second else {}
    mine, there = make_drafter(make_target("qwen3"), **sizes), Hub()
    monkeypatch.setattr(hub, "HfApi", there)
    mine.push_to_hub("me/mine", target="some/target")
    for name, content in there.files.items():
        (tmp_path / name).write_bytes(content)
    card = ModelCard(there.files["README.md"].decode()).text
    (line,) = (line for line in card.splitlines() if line.startswith("drafter = "))
    again = eval(line.removeprefix("drafter = ").replace("me/mine", str(tmp_path)), {"td": td})
    assert type(again) is type(mine) and f"| kind | {mine.kind} |" in card


def test_a_card_that_is_there_stays_unless_something_is_said(drafter, monkeypatch):
    there = Hub(there=["README.md"])
    monkeypatch.setattr(hub, "HfApi", there)
    drafter.push_to_hub("me/mine")
    assert "README.md" not in there.files
    drafter.push_to_hub("me/mine", target="some/target")
    assert b"some/target" in there.files["README.md"]
    drafter.push_to_hub("me/mine", card=ModelCard("---\nlicense: mit\n---\nMy words."))
    assert b"My words." in there.files["README.md"]
    fresh = Hub()
    monkeypatch.setattr(hub, "HfApi", fresh)
    drafter.push_to_hub("mine")
    assert b"Not measured." in fresh.files["README.md"] and b"does not name" in fresh.files["README.md"]
    assert b'load_drafter("me/mine"' in fresh.files["README.md"]  # the token's user is the owner


def test_what_cannot_be_pushed_makes_no_repository(drafter, monkeypatch):
    there = Hub()
    monkeypatch.setattr(hub, "HfApi", there)
    with pytest.raises(ValueError):
        drafter.push_to_hub("me/mine", acceptance={"gsm8k": "many"})
    monkeypatch.setattr(drafter.config, "vocab_size", 0)
    with refuses(ValueError, "vocab_size=0", "set drafter.config.vocab_size"):
        drafter.push_to_hub("me/mine")
    assert not there.calls


def test_saving_does_not_push_behind_the_card(drafter, tmp_path):
    with refuses(ValueError, "push_to_hub=True", "drafter.push_to_hub(repo_id)"):
        drafter.save_pretrained(tmp_path, push_to_hub=True)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("auto", [AutoModel, AutoModelForCausalLM])
@pytest.mark.parametrize("options", [{}, {"trust_remote_code": True}])
def test_automodel_never_makes_weights_up(drafter, tmp_path, auto, options):
    drafter.save_pretrained(tmp_path)
    with pytest.raises((AssertionError, ValueError), match=r"(?i)padding_idx"):
        auto.from_pretrained(tmp_path, **options)
    again = td.DFlashDraftModel.from_pretrained(tmp_path)
    assert again.config.pad_token_id is None
    # A second save writes the same config, and a checkpoint in z-lab's own layout has no pad id either.
    again.save_pretrained(tmp_path / "again")
    assert (tmp_path / "again/config.json").read_text() == (tmp_path / "config.json").read_text()
    publish(tmp_path)
    assert td.DFlashDraftModel.from_pretrained(tmp_path).config.pad_token_id is None


CACHE = """
import sys, torch
import jax_bridge as jb, torch_dflash as td
from pathlib import Path
cache = Path(CACHE_DIR)
where = {"cache_dir": cache, "local_files_only": True}
values = {}
for revision in ("main", "v2", "b" * 40):
    drafter = td.DFlashDraftModel.from_pretrained(
        "somebody/drafter", revision=revision, subfolder="inner", token="none", **where
    )
    values[revision] = drafter.norm.weight[0].item()
print(values["main"], values["v2"], values["b" * 40])
target = jb.load("somebody/drafter", revision="v2", subfolder="target", **where)
print(len(target.arrays) > 3)
for wrong in ({"revision": "v3"}, {"subfolder": "other"}):
    try:
        td.DFlashDraftModel.from_pretrained("somebody/drafter", **({"subfolder": "inner"} | wrong), **where)
    except OSError as error:
        print("refused", "cache" in str(error))
"""


def test_any_place_of_a_repository_comes_from_the_cache(drafter, tmp_path):
    repository = tmp_path / "models--somebody--drafter"
    (repository / "refs").mkdir(parents=True)
    target = make_target("llama")
    for commit, ref, value in (("a" * 40, "main", 3.0), ("b" * 40, "v2", 7.0)):
        snapshot = repository / "snapshots" / commit
        drafter.save_pretrained(snapshot / "inner")
        other = td.DFlashDraftModel.from_pretrained(snapshot / "inner")
        torch.nn.init.constant_(other.norm.weight, value)
        shutil.rmtree(snapshot / "inner")
        other.save_pretrained(snapshot / "inner")
        target.save_pretrained(snapshot / "target")
        (repository / "refs" / ref).write_text(commit)
    done = python(CACHE.replace("CACHE_DIR", repr(str(tmp_path))), HF_HUB_OFFLINE="1")
    said = ["3.0 7.0 7.0", "True", "refused True", "refused True"]
    assert done.stdout.splitlines() == said, done.stderr[-2000:]


def test_an_unknown_option_of_load_is_named(tmp_path):
    import jax_bridge as jb

    with refuses(TypeError, "unknown option 'revison'", "revision"):
        jb.load(str(tmp_path), revison="v2")
