"""The figures of an evaluation as a table, and in a drafter's model card."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch_dflash.train.files import write_atomically

HEADING = "## Acceptance\n"


def acceptance_table(sets: dict[str, dict[str, Any]]) -> str:
    """`Evaluation.row` figures by set as Markdown: acceptance lengths, then the rate of each position.

    Below it, the turns that were left out.
    """
    width = max(len(row["per_position"]) for row in sets.values())
    heads = ["set", "acceptance length", "n-gram lookup", *map(str, range(1, width + 1))]
    lines = [heads, ["---"] * len(heads)]
    for name, row in sets.items():
        rates = [f"{rate:.2f}" for rate in row["per_position"]]
        means = [row["acceptance_length"], row["ngram_acceptance_length"]]
        lines.append([name, *("-" if mean is None else f"{mean:.2f}" for mean in means), *rates])
    left_out = [f"{name} {row['left_out']}" for name, row in sets.items() if row.get("left_out")]
    note = f"\n\nTurns left out, beyond the target's context: {', '.join(left_out)}." if left_out else ""
    return "\n".join(f"| {' | '.join(line)} |" for line in lines) + note


def add_figures(directory: Path, figures: dict[str, Any]) -> None:
    """Put the figures that ``train evaluate --json`` wrote at the end of the card in ``directory``."""
    card = directory / "README.md"
    before = card.read_text().partition(HEADING)[0].rstrip() if card.exists() else f"# {directory.name}"
    options, origin = figures["options"], figures["provenance"]
    text = f"""{before}

{HEADING}
Greedy, first {options["limit"]} prompts of each set, {options["max_new_tokens"]} new tokens at most.
{origin["hardware"]}. Numbered columns: share of rounds in which draft k and all before it were
accepted. N-gram lookup on the same texts.

{acceptance_table(figures["sets"])}

```sh
{origin["command"]}
```
"""
    write_atomically(card, lambda part: part.write_text(text))
