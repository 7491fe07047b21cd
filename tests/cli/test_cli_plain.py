"""Commands without a drafter, ``--quiet``, NO_COLOR, ``env`` and ``list --decodes``."""

import io
import json
import shutil
import warnings
from importlib.metadata import version

import pytest
from support.shell import python
from support.tiny import make_drafter, make_target
from support.tokenizers import byte_tokenizer

import torch_dflash as td
from torch_dflash import progress
from torch_dflash.cli import main
from torch_dflash.cli.arguments import plainly


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A saved pair, its target in a folder with a published target's name."""
    folder = tmp_path_factory.mktemp("pair")
    target = make_target("qwen3", vocab_size=257, max_position_embeddings=128, eos_token_id=0, pad_token_id=0)
    target.save_pretrained(folder / "Qwen3-4B")
    byte_tokenizer().save_pretrained(folder / "Qwen3-4B")
    make_drafter(target).save_pretrained(folder / "drafter")
    return folder


def generate(folder, *options):
    line = ["generate", "--model", str(folder / "Qwen3-4B"), "--prompt", "hello", "--runtime", "eager"]
    return main([*line, "--max-tokens", "6", *options])


def test_without_a_drafter_decoding_is_plain_and_says_so(folder, capsys):
    assert generate(folder) == 0
    plain, err = capsys.readouterr()
    assert err.splitlines()[0] == (
        "torch-dflash generate: no --draft-model, so decoding is plain; pass --draft-model "
        "z-lab/Qwen3-4B-DFlash-b16."
    )
    assert generate(folder, "--draft-model", "none") == 0
    out, err = capsys.readouterr()
    assert out == plain and "so decoding is plain" not in err


def test_what_drafts_is_named_where_it_is_known():
    for target, words in (
        ("Qwen/Qwen3-8B", "pass --draft-model z-lab/Qwen3-8B-DFlash-b16."),
        ("demo", "pass --draft-model demo."),
        ("some/model", "torch-dflash list shows published ones."),
        ("Qwen/Qwen3.5-27B", "pass --draft-model z-lab/Qwen3.5-27B-DFlash."),  # no hub id in its row
        (
            "zai-org/GLM-5.3-Flash",
            "torch-dflash list shows published ones.",
        ),  # it is refused
    ):
        assert plainly(target, "torch-dflash chat").endswith(f"so decoding is plain; {words}")


def test_quiet_leaves_the_text_and_errors(folder, capsys, tmp_path):
    shutil.copytree(folder / "drafter", tmp_path / "odd")
    config = json.loads((tmp_path / "odd/config.json").read_text())
    (tmp_path / "odd/config.json").write_text(json.dumps(config | {"max_position_embeddings": 100}))
    with warnings.catch_warnings():
        assert generate(folder, "--draft-model", str(tmp_path / "odd"), "--quiet") == 0
        assert generate(folder, "-q") == 0
        out, err = capsys.readouterr()
        assert err == "" and len(out.splitlines()) == 2
        assert generate(folder, "--quiet", "--device", "nowhere") == 2
    assert "--device nowhere" in capsys.readouterr().err


def test_quiet_silences_the_hubs_retries():
    done = python(
        "import logging, huggingface_hub\n"
        "from torch_dflash.cli.command import silence\n"
        "silence()\n"
        "logging.getLogger('huggingface_hub.utils._http').warning('Retrying in 1s')\n"
    )
    assert done.returncode == 0 and done.stderr == ""


def test_bars_are_none_while_it_is_quiet(capsys):
    with progress.quiet(True), progress.progress_bar(True, total=2) as bar:
        bar.update()
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("value", "shown"), [(None, True), ("", True), ("1", False)])
def test_no_color_is_heeded(monkeypatch, value, shown):
    monkeypatch.delenv("NO_COLOR", raising=False)
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    terminal = io.StringIO()
    assert not progress.coloured(terminal)
    monkeypatch.setattr(terminal, "isatty", lambda: True, raising=False)
    assert progress.coloured(terminal) == shown


def test_env_says_what_a_bug_report_needs(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "torch-dflash/xla").mkdir(parents=True)
    (tmp_path / "torch-dflash/xla/program").write_bytes(bytes(1_500_000))
    assert main(["env", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["packages"]["torch"] == version("torch") and found["jax"].startswith("cpu")
    assert found["caches"][str(tmp_path / "torch-dflash/xla")] == "1.5 MB"
    assert main(["env"]) == 0
    out = capsys.readouterr().out
    for part in ("python", "transformers ", "cpu ", "1.5 MB", f"rm -r {tmp_path / 'torch-dflash/xla'}"):
        assert part in out, out


def test_env_without_any_cache(capsys, monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "none"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "caches    none"
    (tmp_path / "hub").mkdir()
    assert main(["env"]) == 0
    assert capsys.readouterr().out.splitlines()[-1] == f"caches    {tmp_path / 'hub'} 0.0 MB"


def test_list_shows_what_decodes(capsys):
    assert main(["list", "--decodes"]) == 0
    lines = capsys.readouterr().out.splitlines()[1:]
    assert {line.split()[-1] for line in lines} == {"yes"}
    assert len(lines) == sum(row.verdict[0] is True for row in td.checkpoints)
