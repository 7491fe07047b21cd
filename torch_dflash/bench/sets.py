"""The nine evaluation sets of the DFlash announcement: how each is wrapped, and the checksums of its texts.

Source of the wrappers: the DFlash authors' evaluation. `data/README.md` says where each set is from.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import NamedTuple

from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import Prompt, read_prompts

MATHS = "{}\nPlease reason step by step, and put your final answer within \\boxed{{}}."
CODE = "Write a solution to the following problem and make sure that it passes the tests:\n```python\n{}\n```"
ISSUE = "Problem Statement:\n{}\nPlease fix the issue described above."


class KnownSet(NamedTuple):
    """One of the nine sets: the text around each question, and `checksum` of all raw prompts.

    ``shipped`` is the checksum of the wrapped prompts in `data`, None where the licence keeps them out.
    """

    wrap: str
    raw: str
    shipped: str | None = None


SETS = {
    "gsm8k": KnownSet(
        MATHS,
        "ab558b3ea45a24aa152b1b92d6ec4d507ad7314298c2bed3bb99684b563a83ef",
        "cbe6fef81247c34ced9ecc03529b0ad9b9c3959ab8f2476afdeb27d781b4e909",
    ),
    "math500": KnownSet(
        MATHS,
        "22d3a61939f22cc47b64b6079644a18ae59b21e9df2b810e0d2b801b2b95d5d2",
        "44e55771b11eb8be2308136369bafe1266d8a4a68047bc61f580e6eaa25e77a0",
    ),
    "aime24": KnownSet(MATHS, "bae306a18d7cef26eac26cc6723a18cff924d0bd5b85599219b5d1d8b1dab439"),
    "aime25": KnownSet(MATHS, "056ca838c19361ef62aac9dbe3a3464aa6a68bf408c18c3d183485e2a53935ab"),
    "humaneval": KnownSet(
        CODE,
        "5b812a3cc71263eef4467c2735c3a20852dd7c2caf6651a8ca7109157e69ce4e",
        "9e668b2533b5cdf1078c7df0d3a9eec9661df095f8113cbd40d59843a28e095d",
    ),
    "mbpp": KnownSet(
        "{}",
        "726993526e05b720d60ca7acc2e4adecaf5740a23821b83e1b5f3a132fb080a4",
        "c6d9024999d3011a12388b99fd7bc4f6f6b570875e7e3a08d2f981d099d9a264",
    ),
    "mt-bench": KnownSet("{}", "29a7e7257a68f05ad41af5a69a4b74d51c176fc60a5ea95c261e70453e5928e8"),
    "alpaca": KnownSet("{}", "453c57d4f4efb51e13d31d7b8a1811b9242a293ca3ae39fb3e6d077f8bec9249"),
    "swe-bench-lite": KnownSet(ISSUE, "77475dbcb9935f752b09843dbdba97206627ad9ef0d82877835b2bd43bce7420"),
}


def checksum(prompts: list[Prompt]) -> str:
    """sha256 of the texts, whatever the file's form: a JSON list of each prompt's turns, one a line."""
    lines = (json.dumps(prompt.turns, ensure_ascii=False) for prompt in prompts)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def read_sets(paths: list[Path]) -> tuple[dict[str, list[Prompt]], dict[str, str]]:
    """The wrapped prompts of each set by its file's name, and the reasons why others were left out.

    Args:
        paths: JSON lines as `read_prompts` takes them, or folders of such files. A file that is called as
            one of the nine must hold its prompts, raw or as in `data`; others are taken as they are.

    Raises:
        StageError: an unreadable file, two files of one name, or no set that is left.
    """
    sets: dict[str, list[Prompt]] = {}
    left_out: dict[str, str] = {}
    for path in [file for given in paths for file in _files(given)]:
        name = path.name.split(".")[0]
        if name in sets or name in left_out:
            raise StageError(f"{path}: another file is called {name}, too; rename one.")
        prompts, known = read_prompts([path]), SETS.get(name)
        found = checksum(prompts)
        if known is None or found == known.shipped:
            sets[name] = prompts
        elif found == known.raw:
            sets[name] = [
                Prompt(one.source, [known.wrap.format(turn.rstrip("\n")) for turn in one.turns])
                for one in prompts
            ]
        else:
            left_out[name] = f"{path} does not hold the texts of data/README.md; theirs have sha256 {found}"
    if not sets:
        raise StageError(f"no set is left: {'; '.join(left_out.values()) or 'the folder holds no *.jsonl'}.")
    return sets, left_out


def _files(path: Path) -> list[Path]:
    return sorted([*path.glob("[!.]*.jsonl"), *path.glob("[!.]*.jsonl.gz")]) if path.is_dir() else [path]
