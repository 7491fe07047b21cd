"""Files of training are whole or absent, and errors name file and line."""

import errno
import gzip
import json
import os
import resource
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors import SafetensorError
from support.refusals import refuses
from support.stages import CACHED, SAID, checksums

from torch_dflash.storage import files
from torch_dflash.storage.files import StageError, write_atomically
from torch_dflash.train.answers import data
from torch_dflash.train.answers.data import Answer, Prompt, read_answers, read_prompts
from torch_dflash.train.answers.regenerate import regenerate
from torch_dflash.train.features import tensorfiles
from torch_dflash.train.features.extract import cache_features
from torch_dflash.train.fit.log import TrainLog
from torch_dflash.train.stages import open_stage


def test_a_failure_in_mid_write_leaves_nothing(world, tmp_path, monkeypatch):
    def compress(*args, **kwargs):
        raise KeyboardInterrupt

    monkeypatch.setattr(data.gzip, "compress", compress)
    with pytest.raises(KeyboardInterrupt):
        regenerate(world.target, world.tokenizer, world.prompts, tmp_path, SAID)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "stage.json"]


KILLED = """
import sys, time, pathlib
from torch_dflash.storage.files import write_atomically
def slow(part):
    with part.open("wb") as file:
        file.write(b"half"); file.flush(); print("writing", flush=True); time.sleep(60)
write_atomically(pathlib.Path(sys.argv[1]), slow)
"""


def test_a_kill_in_mid_write_leaves_what_was_there(tmp_path):
    path = tmp_path / "answers-00000-of-00001.jsonl.gz"
    with subprocess.Popen([sys.executable, "-c", KILLED, str(path)], stdout=subprocess.PIPE) as process:
        assert process.stdout.readline() == b"writing\n"
        os.kill(process.pid, signal.SIGKILL)
    assert [name.suffix for name in tmp_path.iterdir()] == [".part"]
    with refuses(StageError, "holds no *.jsonl"):  # the half file is no answer
        read_answers([tmp_path])
    write_atomically(path, lambda part: part.write_bytes(b"new"))
    assert {name.name: name.read_bytes() for name in tmp_path.iterdir()} == {path.name: b"new"}


def full(path, *args, **kwargs):
    raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_disk_says_what_is_kept_and_what_to_do(world, tmp_path, monkeypatch):
    cache_features(world.target, world.sequences, tmp_path / "f", CACHED)
    kept = checksums(tmp_path / "f")
    (tmp_path / "f" / "features-00002-of-00003.safetensors").unlink()
    monkeypatch.setattr(tensorfiles, "save_file", lambda *args: full(None))
    words = ["is full", "MB free", "nothing written before is lost", "Free some space"]
    with refuses(StageError, str(tmp_path / "f"), *words):
        cache_features(world.target, world.sequences, tmp_path / "f", CACHED)
    monkeypatch.undo()
    assert len(checksums(tmp_path / "f")) == 2 and [one.name for one in (tmp_path / "f").glob(".*")] == [
        ".lock"
    ]
    cache_features(world.target, world.sequences, tmp_path / "f", CACHED)
    assert checksums(tmp_path / "f") == kept
    log = TrainLog(tmp_path, 0)
    monkeypatch.setattr(Path, "open", full)
    with refuses(StageError, "log.jsonl", "Free some space"):
        log.write(step=1)


def test_a_real_limit_on_the_size_of_files_says_the_same(world, tmp_path):
    """safetensors writes in Rust and raises its own error, not an OSError."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (8192, before[1]))
    try:
        with refuses(StageError, "features-00000-of-00003", "ulimit -f", "goes on from here"):
            cache_features(world.target, world.sequences, tmp_path, CACHED)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "stage.json"]
    cache_features(world.target, world.sequences, tmp_path, CACHED)


def test_a_full_disk_is_known_from_the_message_of_rust(tmp_path):
    with refuses(StageError, "is full", "Free some space"), files.naming_a_full_disk(tmp_path / "x"):
        raise SafetensorError("I/O error: No space left on device (os error 28)")
    with pytest.raises(SafetensorError), files.naming_a_full_disk(tmp_path / "x"):
        raise SafetensorError("something else")


def test_other_failures_of_a_write_keep_their_name_and_the_old_file(tmp_path):
    def half(part):
        part.write_text("half")
        raise PermissionError(13, "no")

    (tmp_path / "x").write_text("old")
    with pytest.raises(PermissionError):
        write_atomically(tmp_path / "x", half)
    assert [path.read_text() for path in tmp_path.iterdir()] == ["old"]


PROMPT_LINES = {"not json": ["is not JSON"], '{"text": "x"}': ["no text to answer", '{"prompt": "..."}']}
PROMPT_LINES |= {'{"turns": []}': ["no text to answer"], '{"turns": "abc"}': ["no text to answer"]}
PROMPT_LINES |= {'{"turns": 5}': ["no text to answer"], '{"prompt": ""}': ["no text to answer"]}
PROMPT_LINES |= {'["x"]': ["no text to answer"]}
ANSWER_LINES = ['{"prompt": "x"}', '{"response_ids": [1, 2]}', '{"prompt": "x", "response_ids": ["1"]}']
ANSWER_LINES += ['{"messages": "x", "response_ids": [1]}', '{"messages": ["x"], "response_ids": [1]}', "3"]


def test_bad_lines_are_named_by_file_and_number(tmp_path):
    path = tmp_path / "math.jsonl"
    for line, words in PROMPT_LINES.items():
        path.write_text('{"prompt": "good"}\n\n' + line + "\n")
        with refuses(StageError, f"{path}:3", *words):
            read_prompts([path])
    for line in ANSWER_LINES:
        path.write_text('{"prompt": "good", "response_ids": [1]}\n' + line + "\n")
        with refuses(StageError, f"{path}:2", "not an answer", "train regenerate"):
            read_answers([path])
    with refuses(StageError, "none.jsonl", "No such file"):
        read_prompts([tmp_path / "none.jsonl"])
    with refuses(StageError, str(tmp_path), "directory"):
        read_prompts([tmp_path])


def test_good_lines_are_read_plain_or_packed(tmp_path):
    lines = '\ufeff{"turns": ["a", "b"]}\r\n{"prompt": "c", "source": "mine"}\n'
    (tmp_path / "math.jsonl").write_bytes(lines.encode())
    (tmp_path / "code.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    found = read_prompts([tmp_path / "math.jsonl", tmp_path / "code.jsonl.gz"])
    assert found == [
        Prompt("math", ["a", "b"]),
        Prompt("mine", ["c"]),
        Prompt("code", ["a", "b"]),
        Prompt("mine", ["c"]),
    ]
    (tmp_path / "said.jsonl").write_text(json.dumps({"prompt": "q", "response_ids": [1, 2]}))
    assert read_answers([tmp_path / "said.jsonl"]) == [
        Answer("said", [{"role": "user", "content": "q"}], [1, 2])
    ]


@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_damaged_shard_of_answers_is_named(world, tmp_path, how):
    path = tmp_path / "answers-00000-of-00001.jsonl.gz"
    data.write_answers(path, world.answers * 20)
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    left = path.read_bytes()[: 0 if how == "empty" else -200]
    path.write_bytes(content if how == "flipped" else left)
    for read in (lambda: read_answers([path]), lambda: data.count_answers(path)):
        with refuses(StageError, str(path), "is damaged", "delete it"):
            read()


def opened(folder, **settings):
    with open_stage(folder, settings, "shard-*"):
        assert (folder / ".lock").exists()


def test_a_stage_goes_on_with_its_settings_alone(tmp_path):
    folder = tmp_path / "deep" / "er"
    for taps in ((1, 2), [1, 2]):
        opened(folder, taps=taps, name="a")
    for settings, words in (
        ({"taps": (1, 3), "name": "b", "a_checksum": 2}, "was begun with name='a', now name='b'"),
        ({"taps": (1, 2), "name": "a", "stage": "fit"}, "another version of torch-dflash: stage"),
        ({"taps": (1, 2)}, "another version of torch-dflash: name"),
    ):
        with refuses(StageError, str(folder), words):
            opened(folder, **settings)
    assert sorted(path.name for path in folder.iterdir()) == [".lock", "stage.json"]
