"""What the demo asks: three fixed questions, and more that are drawn from files of prompts."""

from __future__ import annotations

import json
import random
from pathlib import Path

QUESTIONS = {
    "maths": "A baker bakes 36 rolls in the morning and half as many in the afternoon. She sells each "
    "roll for 2 dollars. How much money does she make if she sells all of them?",
    "code": "Write a Python function that returns the n-th Fibonacci number, and explain how it works.",
    "chat": "Why is the sky blue? Explain it to a child.",
}


def draw(directory: Path, count: int, seed: int = 0) -> list[tuple[str, str]]:
    """``count`` first turns of the prompts in ``directory``, JSON lines of ``{"turns": [...]}``, by ``seed``.

    Returns the file's name and the question of each. As many come from each file as can be.

    Raises:
        ValueError: there is no such folder, there are fewer in it, or a line is something else.
    """
    if not directory.is_dir():
        raise ValueError(f"{directory}: there is no such folder; name one with --prompts.")
    generator, decks = random.Random(seed), []
    for path in sorted(directory.glob("*.jsonl")):
        turns = _first_turns(path)
        decks.append([(path.stem, turn) for turn in generator.sample(turns, len(turns))])
    drawn = [
        deck[place] for place in range(max(map(len, decks), default=0)) for deck in decks if place < len(deck)
    ]
    if len(drawn) < count:
        raise ValueError(
            f"{directory}: {len(drawn)} prompts in its *.jsonl, {count} are asked for; ask for fewer."
        )
    return drawn[:count]


def _first_turns(path: Path) -> list[str]:
    """Of each line that is not blank."""
    try:
        with path.open(encoding="utf-8-sig") as file:
            lines = list(file)  # not `splitlines`: a question may hold U+2028
    except (ValueError, OSError) as error:
        raise ValueError(f"{path}: cannot be read ({error}); is it a text file in UTF-8?") from error
    found = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            first = json.loads(line)["turns"][:1]
        except (ValueError, KeyError, TypeError, RecursionError):
            first = None
        if not (isinstance(first, list) and first and isinstance(first[0], str) and first[0].strip()):
            raise ValueError(f'{path}:{number}: must be an object like {{"turns": ["a question"]}}.')
        found.append(first[0])
    return found
