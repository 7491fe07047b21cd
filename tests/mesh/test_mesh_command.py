"""``torch-dflash generate --mesh`` on four CPU devices, from the command line to the text."""

import json

import pytest
from support.slices import run_on_four

GENERATE = [
    "-m",
    "torch_dflash",
    "generate",
    "--target",
    "demo",
    "--drafter",
    "demo",
    "--jsonl",
    "--file",
    "-",
]
PROMPTS = "\n".join(json.dumps({"prompt": text}) for text in ("Why is the sky blue?", "Count to five."))


def said(*options: str) -> list[str]:
    lines = run_on_four([*GENERATE, "--max-new-tokens", "24", *options], PROMPTS).splitlines()
    return [json.loads(line)["text"] for line in lines]


@pytest.mark.heavy
def test_the_command_says_on_four_devices_what_it_says_on_one():
    texts = said("--mesh", "4")
    assert len(texts) == 2 and all(texts)
    assert texts == said("--mesh", "auto", "--cache", "paged") == said("--runtime", "eager")
    assert texts == said("--mesh", "4", "--union", "--rows", "8")
