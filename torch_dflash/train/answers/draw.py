"""A few questions, drawn from files of prompts."""

from __future__ import annotations

import random
from pathlib import Path

from torch_dflash.storage.files import StageError
from torch_dflash.train.answers.data import read_prompts


def draw(directory: Path, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """``count`` first turns of the prompts in ``directory``, JSON lines as `read_prompts` takes, by ``seed``.

    Returns the file's name and the question of each. As many come from each file as can be.

    Raises:
        StageError: there is no such folder, there are fewer in it, or what `read_prompts` raises.
    """
    if not directory.is_dir():
        raise StageError(f"{directory}: is not a folder; name one that holds *.jsonl or *.jsonl.gz.")
    generator, decks = random.Random(seed), []
    for path in sorted(directory.glob("[!.]*")):
        if not path.name.endswith((".jsonl", ".jsonl.gz")):
            continue
        prompts = read_prompts([path])
        name = path.name.split(".")[0]
        decks.append([(name, one.turns[0]) for one in generator.sample(prompts, len(prompts))])
    drawn = [
        deck[place] for place in range(max(map(len, decks), default=0)) for deck in decks if place < len(deck)
    ]
    if len(drawn) < count:
        raise StageError(
            f"{directory}: {len(drawn)} prompt(s) in its *.jsonl and *.jsonl.gz, {count} are asked for; "
            "ask for fewer, or name another folder."
        )
    return drawn[:count]
