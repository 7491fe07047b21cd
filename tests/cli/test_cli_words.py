"""A mistyped word is named, whatever stands behind it; ``--version``."""

import pytest

from torch_dflash import __version__
from torch_dflash.cli import main

PAIR = "--target demo --drafter demo"
WRONG = {
    f"generate {PAIR} --prompt hi --max-tokens 4": "option --max-tokens; did you mean --max-new-tokens?",
    f"generate {PAIR} --promt=hi": "unknown option --promt; did you mean --prompt?",
    "generate --traget demo --drafter demo -": "unknown option --traget; did you mean --target?",
    f"generate {PAIR} -p hi": "unknown option -p; see torch-dflash generate --help.",
    f"generate {PAIR} --raw --xyz": "unknown option --xyz; see torch-dflash generate --help.",
    f"generate {PAIR} hi": "'hi' has no option before it; a prompt is --prompt TEXT",
    f"generate {PAIR} --prompt": "argument --prompt: expected one argument",
    f"generate {PAIR} --stop -x": "argument --stop: expected one argument",
    f"chat {PAIR} --temprature 1": "unknown option --temprature; did you mean --temperature?",
    f"aot {PAIR} --bloc-size 4": "unknown option --bloc-size; did you mean --block-size?",
    "fit-memory --targets demo": "unknown option --targets; did you mean --target?",
    "list --jsn qwen": "unknown option --jsn; did you mean --json?",
    "train fit --answer a --outs b": "unknown option --outs; did you mean --out?",
    "train --quiet fit": "unknown option --quiet; see torch-dflash train --help.",
    "--verbose generate --prompt hi": "unknown option --verbose; see torch-dflash --help.",
    f"generate {PAIR} --Top_K 3": "unknown option --Top_K; did you mean --top-k?",
    "generate --version": "unknown option --version; see torch-dflash generate --help.",
    "list --device cpu": "unknown option --device; see torch-dflash list --help.",
    "genrate --prompt hi": "invalid choice: 'genrate'",
}


@pytest.mark.parametrize("words", WRONG)
def test_the_wrong_word_is_named(capsys, words):
    with pytest.raises(SystemExit) as ended:
        main(words.split())
    assert ended.value.code == 2
    assert WRONG[words] in capsys.readouterr().err.splitlines()[-1]


def test_the_version(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0 and capsys.readouterr().out == f"torch-dflash {__version__}\n"
