"""The command line's words: both spellings, mistyped words, help; none imports torch."""

import gc
import shlex
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
from support import ROOT
from support.shell import python

from torch_dflash import __version__
from torch_dflash.cli import leave_garbage, main, parse, root

PAIR = "--target demo --drafter demo"
SEE = "See torch-dflash"
WRONG = {
    f"generate {PAIR} --prompt hi --max-toks 4": "No such option '--max-toks'. Did you mean --max-tokens?",
    f"generate {PAIR} --promt=hi": "No such option '--promt'. Did you mean --prompt?",
    "generate --traget demo --drafter demo -": "No such option '--traget'. Did you mean --target?",
    f"generate {PAIR} -p hi": f"No such option '-p'. {SEE} generate --help.",
    f"generate {PAIR} --raw --xyz": "No such option '--xyz'.",
    f"generate {PAIR} hi": "'hi' has no option before it; a prompt is --prompt TEXT.",
    f"generate {PAIR} --prompt": "Option '--prompt' requires an argument.",
    f"chat {PAIR} --temprature 1": "Did you mean --temperature?",
    f"aot {PAIR} --bloc-size 4": "Did you mean --block-size?",
    "fit-memory --targets demo": "Did you mean --target?",
    "list --jsn qwen": "Did you mean --json?",
    "train fit --answer a --outs b": "Did you mean --answers?",
    "train --quick fit": "No such option '--quick'.",
    "train --epochs 3 fit": "Options follow the command: torch-dflash train fit --epochs",
    "--temp 1 chat --model demo": "Options follow the command: torch-dflash chat --temp",
    "--model m": "Options follow the command: torch-dflash generate --model",
    "generate --model": "torch-dflash generate: Option '--model' requires an argument. See",
    "generate --model= --prompt hi": "Invalid value for '--model' / '--target': '' is empty; name",
    "aot --model m --draft-model=": "Invalid value for '--draft-model' / '--drafter': '' is empty",
    "--json list": "Options follow the command: torch-dflash list --json",
    "--verbose generate --prompt hi": "No such option '--verbose'.",
    "generate --version": "No such option '--version'.",
    "list --device cpu": "No such option '--device'.",
    "list --cache-dir x": "it is for --check; pass that too.",
    "genrate --prompt hi": "No such command 'genrate'.",
    "generate --prompt hi": "Missing option '--model' / '--target'. See torch-dflash generate --help.",
    f"generate {PAIR} --runtime cuda": "'cuda' is not one of 'xla', 'eager'",
    "train regenerate --model demo --out o --prompts p --runtime cuda": "'cuda' is not one of 'xla', 'eager'",
    "train fit --model demo --out o --answers a --head x": "'dflash', 'convolutions', 'dflash2', 'dspark'",
    f"generate {PAIR} --prompt hi --device cuda": "XLA runs on JAX's default device",
}


@pytest.mark.parametrize("words", WRONG)
def test_the_wrong_word_is_named(capsys, words):
    assert main(words.split()) == 2
    out, err = capsys.readouterr()
    assert WRONG[words] in err and err.count("\n") == 1 and not out


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        ("generate --model m --draft-model d --max-tokens 3 --temp 0.5", ("m", "d", 3, 0.5)),
        ("generate --target m --drafter d --max-new-tokens 3 --temperature 0.5", ("m", "d", 3, 0.5)),
        ("generate --target m --drafter d --max_new_tokens 3 --Temperature .5", ("m", "d", 3, 0.5)),
        ("chat --model m", ("m", None, 256, 0.0)),
    ],
)
def test_options_have_the_names_of_this_field(words, wanted):
    given = parse(words.split()).arguments
    assert (given.target, given.drafter, given.max_new_tokens, given.temperature) == wanted


def test_an_option_takes_several_words():
    line = (
        "train all --model m --out o --prompts a b --eval_prompts=c d --fit='--epochs 1 --steps 2' --online"
    )
    given = parse(shlex.split(line)).arguments
    assert (given.prompts, given.eval_prompts, given.fit) == (["a", "b"], ["c", "d"], "--epochs 1 --steps 2")
    assert parse("aot --model m --passes draft round".split()).arguments.passes == ["draft", "round"]
    assert parse("aot --model m".split()).arguments.passes == ["verify", "draft", "round"]
    given = parse("generate --model m --stop a --stop -b --prompt -5".split()).arguments
    assert (list(given.stop), given.prompt) == (["a", "-b"], "-5")


def commands(group, path=()):
    for name, one in group.commands.items():
        yield " ".join([*path, name])
        if hasattr(one, "commands"):
            yield from commands(one, (*path, name))


def test_help_the_version_the_list_and_wrong_usage_import_nothing_heavy():
    lines = [f"{name} --help" for name in commands(root)] + ["--help", "--version", "list qwen --decodes"]
    done = python(
        "import contextlib, io, sys\nfrom torch_dflash.cli import main\n"
        f"for line in {lines + list(WRONG)}:\n"
        "    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):\n"
        f"        assert main(line.split()) == (2 if line in {list(WRONG)} else 0), line\n"
        "print(sorted({'torch', 'transformers', 'jax', 'numpy', 'tqdm'} & set(sys.modules)))\n"
    )
    assert done.stdout == "[]\n", done.stderr
    assert len(lines) > 18


@pytest.mark.parametrize(
    "words", ["-q list", "list --quiet", "--quiet train fit --model m --out o --answers a"]
)
def test_quiet_stands_before_the_command_or_after_it(words):
    assert parse(words.split()).arguments.quiet is True
    assert parse(words.replace("--quiet", "").replace("-q", "").split()).arguments.quiet is False


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no file that is always full")
@pytest.mark.parametrize("words", ["--help", "--version", "train fit --help", "list"])
def test_a_full_disk_is_one_line(words):
    with open("/dev/full", "w") as full:
        line = [sys.executable, "-m", "torch_dflash", *words.split()]
        done = subprocess.run(line, cwd=ROOT, stdout=full, stderr=subprocess.PIPE, text=True)
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and "No space left" in done.stderr


@pytest.mark.parametrize("there", [False, True])
def test_triton_is_collected_at_the_end_and_nothing_else(there, monkeypatch):
    left = []
    monkeypatch.setattr(gc, "freeze", lambda: left.append(True))
    if there:
        monkeypatch.setitem(sys.modules, "triton", SimpleNamespace())
    else:
        monkeypatch.delitem(sys.modules, "triton", raising=False)
    leave_garbage()
    assert left == [True] * (not there)


def test_the_version(capsys):
    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"torch-dflash {__version__}\n"


@pytest.mark.parametrize("words", [[], ["train"]])
def test_a_group_alone_shows_its_commands(words, capsys):
    assert main(words) == 2
    assert "Commands:" in capsys.readouterr().err


def test_a_shell_completes_options_and_choices():
    for words, found in (("generate --max", "--max-tokens"), ("generate --cache ", "paged"), ("tr", "train")):
        options = {"_TORCH_DFLASH_COMPLETE": "bash_complete", "COMP_WORDS": f"torch-dflash {words}"}
        options |= {"COMP_CWORD": str(len(words.split(" ")))}
        done = python("from torch_dflash.cli import main\nmain()", **options)
        assert f"plain,{found}" in done.stdout.split(), (done.stdout, done.stderr)


@pytest.mark.parametrize(
    "words", ["generate --file ", "generate --model ", "doctor --json ", "list --cache-dir "]
)
def test_a_shell_completes_paths(words):
    options = {"_TORCH_DFLASH_COMPLETE": "bash_complete", "COMP_WORDS": f"torch-dflash {words}"}
    options |= {"COMP_CWORD": str(len(words.split(" ")))}
    done = python("from torch_dflash.cli import main\nmain()", **options)
    assert done.stdout.startswith("file,"), (done.stdout, done.stderr)
