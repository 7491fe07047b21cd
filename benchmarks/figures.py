"""Fill every table and figure of the pages from the JSON files in docs/results.

    make figures

A page holds what is filled between two comments, in lines of its own or inside a sentence:

    <!-- figures: demo -->
    <!-- end -->

The names are those of `figure_blocks.BLOCKS`. Long tables are pages in docs/tables. Change a JSON,
run this, commit both.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from figure_bars import bars
from figure_blocks import BLOCKS, result
from figure_compare import compare_bars, compare_curves, compare_depths
from figure_kflat import PAIRS, times
from figure_trees import curves

from torch_dflash.train.export import add_figures

ROOT = Path(__file__).parents[1]
CARD = ROOT / "torch_dflash/assets/smollm2-135m-instruct-dflash"
PICTURE, TREES, ROWS = (ROOT / f"docs/{name}.svg" for name in ("acceptance", "trees", "kflat"))
COMPARED = {"compare": compare_bars, "compare_depth": compare_depths, "compare_fit": compare_curves}
MARKED = re.compile(r"<!-- figures: ([a-z0-9-]+) -->(.*?)<!-- end -->", flags=re.S)


def pages() -> list[Path]:
    """Every page that may hold figures."""
    return [ROOT / "README.md", ROOT / "benchmarks/README.md", *sorted((ROOT / "docs").rglob("*.md"))]


def by_rows() -> str:
    """The picture of verify passes by their rows."""
    return times({pair: result(f"kflat/{pair}") for pair in PAIRS})


def filled(text: str) -> str:
    """``text`` with new contents between its markers."""

    def fill(match: re.Match[str]) -> str:
        name, old = match.groups()
        if name not in BLOCKS:
            raise KeyError(f"figures: {name}: no such block; there are {', '.join(sorted(BLOCKS))}.")
        made = BLOCKS[name]()
        # Blank lines: a table that follows a comment at once is a table to some readers only.
        apart = "\n" if made.startswith("```") else "\n\n"
        made = f"{apart}{made}{apart}" if old.startswith("\n") else made
        return f"<!-- figures: {name} -->{made}<!-- end -->"

    return MARKED.sub(fill, text)


def main() -> None:
    """Write every page, the pictures and the model card; say which changed."""
    made = {page: filled(page.read_text()) for page in pages()}
    made |= {PICTURE: bars(result("trees")), TREES: curves(result("trees")), ROWS: by_rows()}
    made |= {ROOT / f"docs/{name}.svg": drawn() for name, drawn in COMPARED.items()}
    for page, text in made.items():
        if not page.exists() or page.read_text() != text:
            page.write_text(text)
            print(f"{page.relative_to(ROOT)} changed", file=sys.stderr)
    add_figures(CARD, result("acceptance_cpu"))


if __name__ == "__main__":
    main()
