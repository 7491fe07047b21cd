"""DFlash2 drafters from files: the published layout loads through each class, and bad files are refused."""

import json
from math import prod

import pytest
import torch
from accelerate import init_empty_weights
from safetensors.torch import load_file, save_file
from support import ROOT
from support.authors import SECOND
from support.tiny import make_drafter, make_pair, make_target, randomise

import torch_dflash as td
from torch_dflash.proposers.checkpoints import drafter_of, load_drafter_config

PUBLISHED = json.loads((ROOT / "tests/fixtures/dflash2_muse_glimmer_30b.json").read_text())


@pytest.fixture
def drafter():
    return make_drafter(make_target("qwen3"), **SECOND)


def test_a_published_config_gives_exactly_its_tensors(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(PUBLISHED["config"]))
    config = load_drafter_config(tmp_path)
    assert isinstance(config, td.DFlash2Config) and config.selector_rank == 256
    with init_empty_weights(include_buffers=False):
        model = drafter_of(config)
    shapes = {name: list(weight.shape) for name, weight in model.named_parameters()}
    assert shapes == PUBLISHED["tensors"]
    assert sum(map(prod, shapes.values())) == 2_772_159_744


def test_it_comes_back_as_it_was_saved(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    assert {name for name in stored if "codebook" in name} == {
        "candidate_selector.predecessor_codebook",
        "candidate_selector.successor_codebook",
    }
    saved = json.loads((tmp_path / "config.json").read_text())
    assert saved["architectures"] == ["DFlash2DraftModel"] and saved["dflash_config"]["selector_rank"] == 12
    for back in (td.load_drafter(tmp_path), td.DFlash2DraftModel.from_pretrained(tmp_path)):
        assert type(back) is td.DFlash2DraftModel
        pairs = zip(drafter.state_dict().items(), back.state_dict().items(), strict=True)
        assert all(one[0] == two[0] and torch.equal(one[1], two[1]) for one, two in pairs)


def test_codebooks_may_have_weight_behind_their_names(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    renamed = {f"{name}.weight" if name.endswith("codebook") else name: stored[name] for name in stored}
    save_file(renamed, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert torch.equal(
        td.load_drafter(tmp_path).candidate_selector.successor_codebook,
        drafter.candidate_selector.successor_codebook,
    )


def test_each_class_refuses_the_other_kind(drafter, tmp_path):
    drafter.save_pretrained(tmp_path / "second")
    make_drafter(make_target("qwen3")).save_pretrained(tmp_path / "first")
    with pytest.raises(
        ValueError, match=r"a DFlash2 drafter, not a DFlash v1 one; load it with .*load_draft"
    ):
        td.DFlashDraftModel.from_pretrained(tmp_path / "second")
    with pytest.raises(ValueError, match=r"a DFlash v1 drafter, not a DFlash2 one"):
        td.DFlash2DraftModel.from_pretrained(tmp_path / "first")
    assert type(td.load_drafter(tmp_path / "first")) is td.DFlashDraftModel


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"conv_group_size": 5}, "conv_group_size=5 does not divide hidden_size=32"),
        ({"selector_top_k": 98}, "selector_top_k=98 of a vocabulary of 97"),
        ({"selector_rank": 0}, "selector_rank=0: must be"),
        ({"conv_kernel_size": 1.5}, "conv_kernel_size=1.5: must be"),
    ],
)
def test_fields_out_of_range_are_named(change, words):
    with pytest.raises(ValueError, match=words):
        make_drafter(make_target("qwen3"), **SECOND | change)


def test_a_missing_or_foreign_tensor_is_named(drafter, tmp_path):
    drafter.save_pretrained(tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    name = "layers.1.mlp_conv.base_kernel"
    for tensors, words in (
        ({other: stored[other] for other in stored if other != name}, f"missing_keys=.*{name}"),
        (stored | {"markov.weight": torch.ones(2)}, "unexpected_keys=.*markov.*a DFlash2 drafter"),
        (stored | {name: torch.ones(2, 3, 32)}, f"mismatched_keys=.*{name}"),
    ):
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        with pytest.raises(ValueError, match=words):
            td.load_drafter(tmp_path)


def test_an_untrained_one_drafts_as_v1_would():
    target, first = make_pair("qwen3", agree=8.0)
    second = td.DFlash2DraftModel(td.DFlash2Config(**first.config.to_dict() | SECOND)).eval()
    missing, _ = second.load_state_dict(first.state_dict(), strict=False)
    assert missing and all("conv" in name or "selector" in name for name in missing)
    texts = []
    for drafter in (first, second):
        ids = torch.tensor([[3, 1, 4, 1, 5]])
        options = {"max_new_tokens": 30, "runtime": "eager", "return_dict_in_generate": True}
        texts.append(td.generate(target, drafter, ids, **options).stats.acceptance_lengths)
    assert texts[0] == texts[1] and max(texts[0][0]) > 1


@pytest.mark.parametrize(
    ("runtime", "options"),
    [("eager", {}), pytest.param("xla", {}, marks=pytest.mark.heavy), ("xla", {"quantize": "int8"})],
)
def test_half_precision_and_int8_read_the_codebooks(runtime, options):
    target, drafter = make_pair("qwen3", agree=8.0, **SECOND)
    target, drafter = target.bfloat16(), drafter.bfloat16()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    options = options | {"max_new_tokens": 30, "runtime": runtime}
    assert torch.equal(
        td.generate(target, drafter, ids, **options), td.generate(target, None, ids, **options)
    )


def test_transformers_own_loop_is_refused():
    target, drafter = make_pair("qwen3", **SECOND)
    with pytest.raises(ValueError, match="speculation_type='dflash' with a DFlash2.*custom_generate"):
        options = {"max_new_tokens": 8, "do_sample": False, "assistant_model": drafter}
        options |= {"speculation_type": "dflash"}
        target.generate(torch.tensor([[1, 2, 3]]), **options)
    own = target.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False)
    block = td.dflash(randomise(drafter, 3), runtime="eager")
    ours = target.generate(
        torch.tensor([[1, 2, 3]]), max_new_tokens=8, do_sample=False, custom_generate=block
    )
    assert torch.equal(own, ours)
