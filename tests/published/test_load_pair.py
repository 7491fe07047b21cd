"""A pair by its name: loaded from the hub's cache, or refused before anything is fetched."""

import socket

import pytest
import torch
from support.hub_cache import HubCache
from support.refusals import refuses
from support.tokenizers import byte_tokenizer
from transformers import PreTrainedConfig

import torch_dflash as td
from torch_dflash.published import load

QWEN = "Qwen/Qwen3-4B", "z-lab/Qwen3-4B-DFlash-b16"


@pytest.fixture
def hub(tmp_path):
    return HubCache(tmp_path)


@pytest.fixture
def offline(hub):
    return {"cache_dir": str(hub.root), "local_files_only": True}


@pytest.mark.filterwarnings("ignore:note. ")
def test_each_config_is_read_once(hub, offline, monkeypatch):
    hub.add_target(QWEN[0])
    hub.add_drafter(QWEN[1])
    read, files = PreTrainedConfig._dict_from_json_file.__func__, []
    told = classmethod(lambda cls, file: files.append(file) or read(cls, file))
    monkeypatch.setattr(PreTrainedConfig, "_dict_from_json_file", told)
    monkeypatch.setattr(load.AutoTokenizer, "from_pretrained", lambda *args, **given: byte_tokenizer())
    td.load_pair("qwen3-4b", **offline)
    assert [str(hub.folder(name) / "config.json") for name in QWEN] == files


@pytest.mark.filterwarnings("ignore:note. ")
def test_a_pair_comes_by_its_name_and_decodes_to_the_targets_text(hub, offline):
    hub.add_target(QWEN[0])
    hub.add_drafter(QWEN[1])
    target, drafter, tokenizer = td.load_pair("qwen3-4b", **offline)
    assert isinstance(drafter, td.DFlashDraftModel) and not drafter.training and not target.training
    inputs = tokenizer("What is this?", return_tensors="pt")
    plain = target.generate(**inputs, max_new_tokens=12, do_sample=False)
    out = td.generate(target, drafter, **inputs, max_new_tokens=12, runtime="eager")
    assert torch.equal(out, plain)


def test_a_pair_of_local_files_is_not_looked_for_on_the_network(hub, offline, monkeypatch):
    hub.add_target(QWEN[0])
    asked = []

    def lookup(*args, **more):
        asked.append(args)
        raise socket.gaierror("no network")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr(socket, "getaddrinfo", lookup)
    load.load_target(QWEN[0], "auto", load.AutoConfig.from_pretrained(QWEN[0], **offline), **offline)
    assert not asked


def test_weights_come_in_the_type_that_is_asked_for(hub, offline):
    hub.add_target(QWEN[0])
    hub.add_drafter(QWEN[1], max_position_embeddings=hub.target.config.max_position_embeddings)
    with pytest.warns(UserWarning, match="mask_token_id"):
        target, drafter, _ = td.load_pair("qwen3-4b", torch.bfloat16, **offline)
    assert target.dtype == drafter.dtype == torch.bfloat16


def test_a_drafter_that_does_not_fit_is_refused_before_the_targets_weights_are_looked_for(
    hub, offline, monkeypatch
):
    hub.add_target(QWEN[0])
    hub.add_drafter(QWEN[1], num_target_layers=9)
    monkeypatch.setattr(load, "load_target", lambda *args, **given: pytest.fail("loaded"))
    with refuses(ValueError, "num_target_layers=9", "has 4 layers"):
        td.load_pair("qwen3-4b", **offline)


def test_a_target_with_weights_missing_is_no_pair(hub, offline):
    hub.add_target(QWEN[0])
    target = hub.target
    kept = {name: weight for name, weight in target.state_dict().items() if "layers.2" not in name}
    target.save_pretrained(hub.folder(QWEN[0]), state_dict=kept)
    with refuses(load.IncompleteWeights, QWEN[0], "lack", "layers.2", "at random"):
        load.load_target(QWEN[0], "auto", load.AutoConfig.from_pretrained(QWEN[0], **offline), **offline)


REFUSED = [
    ("gemma-4-e2b-dflash2", ["share keys and values"]),
    ("kimi-k2.6-dspark", ["of kind DSpark in a layout that no public config shows", "load_drafter tells"]),
    ("qwen3-8b-xpress", ["of kind XPress", "DFlash, DFlash2 or DSpark"]),
    ("ornith-1.5-122b-dflash2", ["hub id of its target and drafter is not known", "load_drafter"]),
    ("minimax-m2.5", ["hub id of its target is not known"]),
    ("qwen3-4", ["name='qwen3-4': no published pair", "did you mean", "'qwen3-4b'", "torch-dflash list"]),
    ("Qwen3-8B", ["did you mean", "'qwen3-8b'"]),
    ("RedHatAI/Qwen3-4B-speculator.dflash2", ["did you mean 'qwen3-4b-dflash2'?"]),
    ("glimmer", ["'muse-glimmer-30b-dflash2'"]),
    ("#", ["none is like it", "torch-dflash list"]),
    (None, ["name=None: no published pair"]),
]


@pytest.mark.parametrize(("name", "words"), REFUSED)
def test_what_cannot_be_decoded_is_refused_before_anything_is_fetched(monkeypatch, name, words):
    for loader in ("load_drafter", "load_target"):
        monkeypatch.setattr(load, loader, lambda *args, **given: pytest.fail("fetched"))
    for loader in (load.AutoConfig, load.AutoTokenizer):
        monkeypatch.setattr(loader, "from_pretrained", lambda *args, **given: pytest.fail("fetched"))
    with refuses(ValueError, *words):
        td.load_pair(name)


def test_every_row_is_either_fetched_or_refused_for_what_it_says(monkeypatch):
    class FetchedError(Exception):
        pass

    def fetched(*args, **given):
        raise FetchedError(args)

    monkeypatch.setattr(load.AutoConfig, "from_pretrained", fetched)
    ready = 0
    for row in td.checkpoints:
        whole = row.decoded is not False and row.foreign is None and row.target and row.drafter
        ready += bool(whole)
        with pytest.raises(FetchedError if whole else ValueError) as caught:
            td.load_pair(row.name)
        if whole:
            assert caught.value.args[0] == (row.target,)
    assert ready > 10
