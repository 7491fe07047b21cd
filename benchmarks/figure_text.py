"""Results as Markdown: tables, items of a list, commands."""

from __future__ import annotations

import json
import shlex
import textwrap
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parents[1] / "docs/results"


def result(name: str) -> dict[str, Any]:
    """One JSON file of docs/results."""
    return json.loads((RESULTS / f"{name}.json").read_text())


def table(*rows: list[Any]) -> str:
    """Rows as Markdown, the first of them the head."""
    head, *body = rows
    return "\n".join(f"| {' | '.join(map(str, row))} |" for row in (head, ["---"] * len(head), *body))


def item(*parts: str) -> str:
    """An item of a list, in lines as long as the pages'."""
    return textwrap.fill(
        "- " + "".join(parts), 118, subsequent_indent="  ", break_on_hyphens=False, break_long_words=False
    )


def spread(one: dict[str, Any]) -> list[str]:
    """A ratio and its quartiles, as cells."""
    low, high = one["quartiles"]
    return [f"{one['ratio']:.2f}", f"{low:.2f} to {high:.2f}"]


def command(line: str) -> str:
    """A command as a block of shell, broken before its options."""
    lines, words = [""], shlex.split(line)
    for word, following in zip(words, [*words[1:], ""], strict=True):
        with_value = f"{word} {following}" if word.startswith("--") else word
        if word.startswith("--") and len(lines[-1]) + len(with_value) > 100:
            lines.append("   ")
        lines[-1] += f" {shlex.quote(word)}" if lines[-1] else word
    return "```sh\n" + " \\\n".join(lines) + "\n```"
