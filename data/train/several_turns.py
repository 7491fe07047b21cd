"""Write `prompts/several_turns.jsonl.gz`: questions of the other files, and what a user asks next.

    python data/train/several_turns.py

The later turns are written for this file. They refer to what was answered, so that a drafter sees contexts
of several turns.
"""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

from torch_dflash.train.answers.data import read_prompts

HERE = Path(__file__).parent / "prompts"
MATHS = [
    "Check the result with a different method.",
    "Explain your second step once more, as if to a child.",
    "Which formula did you use, and when does it not apply?",
    "Now double every number of the question and solve it again.",
    "Write the solution as a short list of steps without words.",
    "Where is a mistake most easily made in this calculation?",
    "Give me a similar question, and its answer.",
    "Summarise the whole solution in one sentence.",
]
CODE = [
    "Add comments that explain every line.",
    "Write three tests for it.",
    "Rewrite it in JavaScript.",
    "What is its running time, and can it be faster?",
    "Handle wrong input with a clear error message.",
    "Split it into two functions with good names.",
    "Explain what it does to someone who has never programmed.",
    "Which inputs would break it?",
]
CHAT = [
    "Make it half as long.",
    "Say the same in simpler words.",
    "Give two examples.",
    "Turn this into a table with two columns.",
    "What would someone who disagrees say?",
    "Continue where you stopped.",
    "Write it as a letter to a friend.",
    "List the three most important points.",
]
SOURCES = {  # file: how many conversations begin there, and what is asked next
    "gsm8k_train": (500, MATHS),
    "math_train": (300, MATHS),
    "gpteacher_codegen": (500, CODE),
    "mbpp_full_train": (200, CODE),
    "gpteacher_roleplay": (600, CHAT),
    "self_instruct_seed": (100, CHAT),
    "arena_hard_v2": (200, CHAT),
}
LONGEST = 800
"""Characters of a first question, so that all turns fit into a context."""


def conversations() -> str:
    """The file's text, drawn by a fixed seed."""
    draw, talks = random.Random(0), []
    for name, (count, later) in SOURCES.items():
        questions = [prompt.turns[0] for prompt in read_prompts([HERE / f"{name}.jsonl.gz"])]
        short = [question for question in questions if len(question) <= LONGEST]
        for question in draw.sample(short, min(count, len(short))):
            talks.append({"turns": [question, *draw.sample(later, draw.choice((1, 2)))]})
    draw.shuffle(talks)
    return "".join(json.dumps(talk, ensure_ascii=False) + "\n" for talk in talks)


if __name__ == "__main__":
    (HERE / "several_turns.jsonl.gz").write_bytes(gzip.compress(conversations().encode(), mtime=0))
