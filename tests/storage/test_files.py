"""A file is whole or absent among other writers and readers, and no link leads a write away."""

import json
import os
import stat
import threading

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.refusals import refuses
from support.threads import in_threads
from support.tiny import make_drafter, make_target
from support.tokenizers import byte_tokenizer

import torch_dflash as td
from torch_dflash.storage.files import write_whole
from torch_dflash.storage.json_text import MOST_DEPTH, parse_json


def test_two_threads_write_one_path_and_a_reader_sees_whole_files(tmp_path):
    path, running = tmp_path / "state", threading.Event()

    def write(value):
        tensors = {"values": torch.full((20_000,), value)}
        for _ in range(25):
            write_whole(path, lambda part: save_file(tensors, part))

    def read():
        running.wait()
        while running.is_set():
            values = load_file(path)["values"]
            assert len(values) == 20_000 and len(values.unique()) == 1

    def write_both():
        write(0)
        running.set()
        errors = in_threads(lambda: write(1), lambda: write(2))
        running.clear()
        assert not errors, errors

    assert not (errors := in_threads(write_both, read)), errors
    assert os.listdir(tmp_path) == ["state"]


def test_a_link_at_the_name_of_the_part_is_not_written_through(tmp_path):
    path, theirs = tmp_path / "state", tmp_path / "theirs"
    theirs.write_text("theirs")
    (tmp_path / f".state.{os.getpid()}.part").symlink_to(theirs)
    write_whole(path, lambda part: part.write_text("ours"))
    assert (path.read_text(), theirs.read_text()) == ("ours", "theirs")


def test_a_part_that_is_there_already_is_neither_written_nor_removed(tmp_path, monkeypatch):
    path, theirs = tmp_path / "state", tmp_path / "theirs"
    monkeypatch.setattr("secrets.token_hex", lambda count: "guessed")
    part = tmp_path / f".state.guessed.{os.getpid()}.part"
    part.symlink_to(theirs)
    with pytest.raises(FileExistsError):
        write_whole(path, lambda part: part.write_text("ours"))
    assert part.is_symlink() and not theirs.exists() and not path.exists()


@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_are_any_files(tmp_path, mask):
    before = os.umask(mask)
    try:
        write_whole(tmp_path / "state", lambda part: save_file({"one": torch.ones(1)}, part))
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "state").stat().st_mode) == 0o666 & ~mask


DEEP = "[" * 100_000
BAD = {
    "{": "Expecting property name", DEEP: "nested more than 200 levels",
    '{"a": ' * 300 + "1" + "}" * 300: "nested more than 200 levels", '{"a": NaN}': "NaN is no JSON",
    "[-Infinity]": "-Infinity is no JSON", "[1, -1e999]": "-1e999 is beyond the largest float",
    "[" + "9" * 5000 + "]": "a number of 5000 digits", '["\\ud83d"]': "'\\ud83d' is half a surrogate pair",
    '{"\\udc00 is no name": 1}': "'\\udc00' is half a surrogate pair",
}  # fmt: skip


@pytest.mark.parametrize("text", BAD)
def test_what_is_no_json(text):
    with refuses(ValueError, BAD[text]):
        parse_json(text)


def test_what_is_json():
    for text in (
        '{"a": ["\\ud83d\\ude00", "é", -0.5e-400, 12345678901234567890, null]}',
        '"[[["',
        '{"a": 1, "b": {"c": 1, "d": 2, "c": [3]}, "a": 4}',
        "[" * 99 + "]" * 99,
    ):
        assert parse_json(text) == json.loads(text)
    level = "[" * MOST_DEPTH
    assert parse_json(level + "]" * MOST_DEPTH)
    with refuses(ValueError, "levels deep"):
        parse_json(f"[{level}1{']' * MOST_DEPTH}]")


def test_half_a_surrogate_pair_in_what_is_not_used():
    text = '{"a": 1, "b": "\\ud800", "\\udfff": 2}'
    assert parse_json(text, used=("a", "c")) == json.loads(text)
    with refuses(ValueError, "'\\ud800' is half a surrogate pair"):
        parse_json(text, used=("a", "b"))
    with refuses(ValueError, "half a surrogate pair"):
        parse_json(f"[{text}]", used=())


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    target = make_target("llama", vocab_size=257)
    target.save_pretrained(folder / "target", max_shard_size="20KB")
    make_drafter(target).save_pretrained(folder / "drafter")
    return folder


def load_by_jax(folder):
    import jax_bridge as jb

    return jb.load(folder / "target")


DOORS = {
    "target/config.json": load_by_jax,
    "target/generation_config.json": load_by_jax,
    "target/model.safetensors.index.json": load_by_jax,
    "drafter/config.json": lambda folder: td.load_drafter(folder / "drafter"),
    "drafter/config.json of from_pretrained": lambda folder: td.DFlashDraftModel.from_pretrained(
        folder / "drafter"
    ),
    "target/config.json of a drafter": lambda folder: td.load_drafter(folder / "drafter", folder / "target"),
}


@pytest.mark.parametrize("door", DOORS)
def test_files_that_are_nested_too_deeply(saved, door):
    file = saved / door.partition(" of ")[0]
    before = file.read_text()
    file.write_text(DEEP)
    try:
        with refuses(ValueError, str(file.parent), "fetch it again"):
            DOORS[door](saved)
    finally:
        file.write_text(before)


def nested(depth):
    found = {}
    for _ in range(depth):
        found = {"not": found}
    return found


def as_format(schema):
    return td.Grammar.of_response_format(
        {"type": "json_schema", "json_schema": {"schema": schema}}, byte_tokenizer()
    )


@pytest.mark.parametrize("make", [lambda one: td.Grammar.json_schema(one, byte_tokenizer()), as_format])
@pytest.mark.parametrize("schema", [nested(3000), nested(200), {"const": float("nan")}, {"const": "\ud800"}])
def test_schemas_that_are_no_json(make, schema):
    with refuses(ValueError, "schema"):
        make(schema)


@pytest.mark.parametrize(
    "given", [nested(3000), {"type": nested(3000)}, {"type": "json_schema", "json_schema": nested(3000)}]
)
def test_a_response_format_that_is_nested_too_deeply(given):
    with refuses(ValueError, "response_format=dict nested too deeply to be shown"):
        td.Grammar.of_response_format(given, byte_tokenizer())


@pytest.mark.parametrize("make", [td.Grammar.json_schema, td.Grammar.regex, td.Grammar.lark])
@pytest.mark.parametrize("text", ['"\ud800"', b"a", None])
def test_texts_of_grammars_that_are_none(make, text):
    with refuses(ValueError, "="):
        make(text, byte_tokenizer())
