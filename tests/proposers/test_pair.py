"""A drafter that does not fit its target is refused before any weight is read."""

import json
import warnings

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.layouts import pair as layout_pair
from support.layouts import publish as publish_layout
from support.published import publish
from support.refusals import refuses
from support.tiny import make_drafter, make_target
from support.tokenizers import byte_tokenizer
from transformers import PreTrainedModel

import torch_dflash as td
from torch_dflash.proposers.notes import findings, mask_in_texts
from torch_dflash.proposers.pair import check_pair


@pytest.fixture
def target():
    return make_target("qwen3")


@pytest.fixture
def nothing_is_read(monkeypatch):
    """Fails a test that reaches transformers' own loading: the checks let the drafter through."""
    monkeypatch.setattr(
        PreTrainedModel, "from_pretrained", lambda *args, **given: pytest.fail("read weights")
    )


MISFITS = [
    ({"hidden_size": 64}, ["hidden_size=64 of the drafter", "target's is 32", "trained for this target"]),
    ({"num_target_layers": 5}, ["num_target_layers=5", "has 4 layers", "trained for this target"]),
    ({"num_target_layers": None, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 4]}},
     ["target_layer_ids=[0, 4]", "[4] lie outside", "4 layers", "one higher"]),
    ({"dflash_config": {"mask_token_id": 97, "target_layer_ids": [0, 2]}},
     ["mask_token_id=97 has no row", "97 rows", "trained with"]),
    ({"dflash_config": {"target_layer_ids": [0, 2]}}, ["mask_token_id is missing", "trained with"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), MISFITS)
@pytest.mark.parametrize("given", ["model", "config", "directory"])
def test_a_misfit_is_refused_before_any_weight_is_read(
    tmp_path, target, nothing_is_read, given, changes, words
):
    (tmp_path / "drafter").mkdir()
    publish(tmp_path / "drafter", **changes)
    target.config.save_pretrained(tmp_path / "target")
    what = {"model": target, "config": target.config, "directory": tmp_path / "target"}[given]
    with refuses(ValueError, *words):
        td.load_drafter(tmp_path / "drafter", what)
    with refuses(ValueError, *words):
        td.DFlashDraftModel.from_pretrained(tmp_path / "drafter", target=what)


def test_an_engine_says_the_same_of_a_drafter_that_was_loaded_without_its_target(tmp_path, target):
    publish(tmp_path, num_target_layers=5)
    with refuses(ValueError, "num_target_layers=5", "trained for this target"):
        td.compile(target, td.load_drafter(tmp_path), runtime="eager", max_length=32)


@pytest.mark.parametrize(
    ("what", "words"),
    [(3, ["target=int", "its config"]), (torch.nn.Linear(1, 1), ["target=Linear", "its config"])],
)
def test_what_is_no_target(tmp_path, what, words):
    publish(tmp_path)
    with refuses(TypeError, *words):
        td.load_drafter(tmp_path, what)


def test_a_drafter_is_no_target(tmp_path, target):
    publish(tmp_path)
    with refuses(TypeError, "DFlashDraftModel", "a DFlash drafter"):
        td.load_drafter(tmp_path, make_drafter(target))


def test_a_target_beside_weights_that_no_file_holds(tmp_path, target):
    tensors = publish(tmp_path)
    with refuses(ValueError, "target= beside state_dict=", "leave it out"):
        td.DFlashDraftModel.from_pretrained(tmp_path, state_dict=tensors, target=target)


def heard(load) -> list[str]:
    with warnings.catch_warnings(record=True) as all_:
        warnings.simplefilter("always")
        load()
    return [str(one.message) for one in all_ if str(one.message).startswith("note: ")]


def fitting(folder, target, **changes):
    """A sound drafter's directory, except for ``changes``."""
    rope = target.config.rope_parameters
    limit = target.config.max_position_embeddings
    given = {"rope_theta": rope["rope_theta"], "max_position_embeddings": limit, "dtype": "float32"}
    publish(folder, **given | changes)
    return folder


ODD = [
    ({}, []),
    ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [2, 0]}},
     ["target_layer_ids=[2, 0]", "set the order"]),
    ({"dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 3]}},
     ["target_layer_ids=[0, 3]", "train it anew"]),
    ({"rope_theta": 777}, ["rope_parameters", "drafters mostly turn as their target does: set that"]),
    ({"max_position_embeddings": 16},
     ["max_position_embeddings=16", "no engine is built for more", "raise it"]),
    ({"dtype": "bfloat16"},
     ["dtype=torch.bfloat16", "target is in torch.float32", "cast", "load both in torch.float32"]),
    ({"vocab_size": 90}, ["vocab_size=90", "the target's is 97", "no table of ids", "same tokenizer"]),
    ({"dtype": "float16"}, ["dtype=torch.float16", "overflows", "pass dtype=torch.bfloat16"]),
    ({"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 2, "layer_types": None},
     ["sliding_window=6", "not heeded", "name those layers sliding_attention"]),
    ({"sliding_window": 5, "use_sliding_window": True, "layer_types": ["sliding_attention"] * 2},
     ["sliding_window=5", "less than the block of 8", "set the one it was trained with"]),
    ({"dflash_config": {"mask_token_id": 7, "target_layer_ids": [0, 2]}},
     ["mask_token_id=7", "a stop id", "set the trained one"]),
]  # fmt: skip


@pytest.mark.parametrize(("changes", "words"), ODD)
def test_what_is_odd_is_warned_of_and_loaded(tmp_path, target, changes, words):
    target.generation_config.eos_token_id = [7, 8]
    folder = fitting(tmp_path, target, **changes)
    said = heard(lambda: td.load_drafter(folder, target))
    assert len(said) == bool(words), said
    for word in words:
        assert word in said[0]
    assert not heard(lambda: td.load_drafter(folder))


def test_every_door_says_what_is_odd_once_for_a_pair(tmp_path, target):
    folder = fitting(tmp_path, target, rope_theta=777, max_position_embeddings=16)
    ids = torch.tensor([[5, 6, 7]])
    asked = {"max_new_tokens": 2, "do_sample": False}
    built = {"runtime": "eager", "verify": False}
    doors = {
        "load_drafter": lambda drafter: None,
        "compile": lambda drafter: td.compile(target, drafter, max_length=16, **built),
        "generate": lambda drafter: td.generate(target, drafter, ids, **asked, **built),
        "custom_generate": lambda drafter: target.generate(
            ids, custom_generate=td.dflash(drafter, **built), **asked
        ),
    }
    for door, ask in doors.items():
        given = target if door == "load_drafter" else None
        drafter = []
        said = heard(lambda: drafter.append(td.load_drafter(folder, given)))  # noqa: B023
        assert len(said) == 2 * (given is not None)
        said += heard(lambda: ask(drafter[0]))  # noqa: B023
        assert ["rope_parameters" in said[0], "max_position_embeddings" in said[1], len(said)] == [1, 1, 2], (
            door
        )
        for again in list(doors.values())[1:]:
            assert not heard(lambda: again(drafter[0])), door  # noqa: B023
    other = make_target("qwen3", rope_parameters={"rope_type": "default", "rope_theta": 5.0})
    (said,) = heard(lambda: td.compile(other, drafter[0], max_length=16, **built))
    assert "5.0" in said


def test_a_type_that_is_asked_for_counts_and_not_the_stored_one(tmp_path, target):
    folder = fitting(tmp_path, target)
    for asked in (torch.bfloat16, "bfloat16"):
        (word,) = heard(lambda asked=asked: td.load_drafter(folder, target, dtype=asked))
        assert "dtype=torch.bfloat16" in word


def test_tables_of_ids_are_no_type_of_weights(tmp_path, target):
    """d2t, a tensor of whole numbers, is the first tensor of such files by name."""
    publish_layout(tmp_path, "speculators", layout_pair("speculators")[1])
    raw = json.loads((tmp_path / "config.json").read_text())
    for dtype in (torch.float32, torch.bfloat16):
        stored = load_file(tmp_path / "model.safetensors")
        stored = {name: part.to(dtype) if part.is_floating_point() else part for name, part in stored.items()}
        save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
        raw.pop("dtype", None)
        (tmp_path / "config.json").write_text(json.dumps(raw))
        said = [word for word in heard(lambda: td.load_drafter(tmp_path, target)) if "dtype" in word]
        assert len(said) == (dtype != target.dtype) and all(f"dtype={dtype}:" in word for word in said), said


@pytest.mark.parametrize("asked", ["bf16", "int32", torch.int32, 3])
def test_a_type_that_no_weights_have_is_named(tmp_path, target, nothing_is_read, asked):
    publish(tmp_path)
    for given in ({}, {"target": target}):
        with refuses(ValueError, f"dtype={asked!r}", "bfloat16", "auto"):
            td.load_drafter(tmp_path, dtype=asked, **given)


def test_a_directory_that_is_not_there_is_named(tmp_path):
    publish(tmp_path)
    with refuses(OSError, f"target='{tmp_path}/none'", "no such directory", "hub id"):
        td.load_drafter(tmp_path, tmp_path / "none")


def test_of_a_directory_the_tokenizer_is_compared_too(tmp_path, target):
    target.config.vocab_size = 257
    target.config.save_pretrained(tmp_path / "target")
    (tmp_path / "drafter").mkdir()
    own = {"vocab_size": 257, "dflash_config": {"mask_token_id": 96, "target_layer_ids": [0, 2]}}
    fitting(tmp_path / "drafter", target, **own, dtype=str(target.dtype).removeprefix("torch."))
    (word,) = heard(lambda: td.load_drafter(tmp_path / "drafter", tmp_path / "target"))
    assert "mask_token_id=96: not compared with the tokenizer of" in word
    tokenizer = byte_tokenizer()
    tokenizer.save_pretrained(tmp_path / "target")
    (word,) = heard(lambda: td.load_drafter(tmp_path / "drafter", tmp_path / "target"))
    assert f"is the token {tokenizer.convert_ids_to_tokens(96)!r}" in word and "set the trained one" in word


def test_a_mask_that_no_text_holds_is_nothing_odd():
    tokenizer = byte_tokenizer()
    assert mask_in_texts(tokenizer, 65) and not mask_in_texts(tokenizer, len(tokenizer) + 3)
    tokenizer.add_special_tokens({"mask_token": "<|mask|>"})
    assert tokenizer.mask_token_id is not None and not mask_in_texts(tokenizer, tokenizer.mask_token_id)
    tokenizer.add_tokens(["<|word|>"])
    assert mask_in_texts(tokenizer, tokenizer.convert_tokens_to_ids("<|word|>"))


def test_a_pair_is_checked_by_its_configs_as_by_its_weights(target):
    drafter = make_drafter(target)
    for one in (target, target.config):
        for other in (drafter, drafter.config):
            check_pair(one, other)
            assert {found.field for found in findings(one, other)} <= {"max_position_embeddings"}
    drafter.config.target_layer_ids = [0, 1, 2]
    with refuses(ValueError, "target_layer_ids names 3 taps", "fc takes"):
        check_pair(target, drafter)


def test_hub_options_that_choose_the_drafters_place_are_not_asked_of_the_target(tmp_path, target):
    (tmp_path / "both" / "drafter").mkdir(parents=True)
    fitting(tmp_path / "both" / "drafter", target)
    target.save_pretrained(tmp_path / "target")
    said = heard(lambda: td.load_drafter(tmp_path / "both", tmp_path / "target", subfolder="drafter"))
    assert len(said) == 1 and "not compared with the tokenizer" in said[0]
    config = json.loads((tmp_path / "target/config.json").read_text())
    (tmp_path / "target/config.json").write_text(json.dumps(config | {"hidden_size": 48}))
    with refuses(ValueError, "hidden_size=32", "48"):
        td.load_drafter(tmp_path / "both", tmp_path / "target", subfolder="drafter")
