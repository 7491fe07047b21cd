"""A pair by its name: loaded from the hub's cache, or refused before anything is fetched."""

import dataclasses
import json
import re
import socket
from importlib.resources import files
from pathlib import Path

import pytest
import torch
from accelerate import init_empty_weights
from support import ROOT
from support.hub_cache import HubCache
from support.refusals import refuses
from support.tokenizers import byte_tokenizer
from transformers import PreTrainedConfig

import torch_dflash as td
from torch_dflash.proposers.checkpoints import drafter_of
from torch_dflash.proposers.dflash.config import default_target_layer_ids
from torch_dflash.published import load, rows
from torch_dflash.published.rows import UNSOURCED

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


ROWS = {row.name: row for row in td.checkpoints}
DATA = json.loads((files("torch_dflash.published") / "pairs.json").read_text())
FAMILIES = {
    name: one
    for file in ("multimodal", "families")
    for name, one in json.loads((ROOT / f"docs/results/{file}.json").read_text())["families"].items()
}


# Shapes without a source. The test below compares the resulting sizes with the published ones.
ASSUMED = {
    # heads and MLP of Qwen3-8B's drafter, not of Llama
    "llama-3.1-8b": {"intermediate_size": 12288, "num_attention_heads": 32, "num_key_value_heads": 8},
    "kimi-k2.5": {"intermediate_size": 18432, "num_attention_heads": 64, "num_key_value_heads": 8},
    # not from the card's recipe, which has eight layers and other taps
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
    given = {
        "num_hidden_layers": row.num_hidden_layers, "block_size": row.block_size or 8,
        "target_layer_ids": list(row.target_layer_ids or ()), "mask_token_id": row.mask_token_id,
        "num_target_layers": row.num_target_layers, "head_dim": 128,
    }  # fmt: skip
    made = td.DFlash2Config if row.kind == "DFlash2" else td.DFlashConfig
    shape = given | {"sliding_window": None} | (row.shape or {}) | ASSUMED.get(row.name, {})
    shape = {"layer_types": ["full_attention"] * shape["num_hidden_layers"]} | shape
    if "sliding_attention" not in shape["layer_types"]:
        shape["sliding_window"] = None  # no source tells the sliding layers, and they change no size
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
    found = row.size is None or matches(row.size, parameters, len(drafter.state_dict()))
    assert found, (row.size, parameters)
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
    assert share == rows.PublishedCounts(known=103, decodes=76, loads=76)
    assert str(share).startswith("103 published drafters are known: 76 decode here, 76 of them")
    assert not [row.name for row in td.checkpoints if row.verdict[0] and not row.loads]
    packed = {row.family for row in td.checkpoints if row.target_weights == "int4"}
    assert packed == {"kimi_k25"}  # whose layout tests/bridge/test_quantised.py loads
    assert rows.share([ROWS["qwen3-4b"], ROWS["qwen3-8b-jetspec"]]) == rows.PublishedCounts(1, 1, 1)
    assert rows.share([ROWS["qwen2.5-0.5b-sample"]]) == rows.PublishedCounts(0, 0, 0)
    quantised = dataclasses.replace(ROWS["qwen3-4b"], target_weights="nvfp4")
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
