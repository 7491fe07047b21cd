"""The results of ``torch-dflash bench``: tables of counts, walls, bytes and dollars, and two pictures."""

from __future__ import annotations

import statistics
from typing import Any

from figure_bars import bars_of
from figure_text import result, table

from torch_dflash.bench.report import tokens_by_law

SETS = "gsm8k math500 aime24 aime25 humaneval mbpp mt-bench alpaca swe-bench-lite".split()
NAMES = {
    "plain": "plain",
    "lookup": "lookup, 8 rows",
    "lookahead": "lookahead, 29 rows",
    "hf": "transformers' `generate`",
    "hf-lookup": "transformers' lookup",
    "hf-dflash": "transformers' DFlash",
    "dflash": "DFlash, chain of 8",
    "dflash:4": "DFlash, 4 rows verified",
    "tree:8": "DFlash, tree of 8",
    "tree:16": "DFlash, tree of 16",
    "union:8": "union of 8",
    "union:16": "union of 16",
    "eagle3": "EAGLE-3",
    "medusa": "Medusa",
    "dflash2": "DFlash2",
}
COLOURS = {"plain": "#9aa5b1", "lookup": "#e0a458", "lookahead": "#9a4f7c", "dflash": "#2a7f62"}
COLOURS |= {"tree:16": "#6fb59b", "union:16": "#3f6fb5"}
WIDTHS = 8, 16, 32, 64, 128


def _counts(name: str = "counts") -> dict[str, dict[str, Any]]:
    """By method and set, the rows of a JSON."""
    sets = result(f"compare/{name}")["counts"]
    methods = list(dict.fromkeys(method for one in sets.values() for method in one["methods"]))
    return {
        method: {where: sets[where]["methods"][method] for where in SETS if where in sets}
        for method in methods
    }


def compare_tau() -> str:
    """Tokens a round of each method on each set, and the mean of the sets."""
    counts = {name: own for name, own in _counts().items() if name in NAMES and name != "dflash:4"}
    rows = []
    for name, own in counts.items():
        values = [row["tokens_per_round"] for row in own.values()]
        cells = [f"{row['tokens_per_round']:.2f}" for row in own.values()]
        mean = statistics.mean(values)
        rows.append([NAMES[name], *cells, f"{mean:.2f}"])
    return table(["tokens a round", *next(iter(counts.values())), "mean"], *rows)


def compare_error() -> str:
    """The largest standard error of any cell with a drafter, and how many answers a cell has."""
    rows = [row for name, own in _counts().items() if not name.startswith("hf") for row in own.values()]
    worst = max(row["standard_error"] or 0 for row in rows)
    answers = sorted({row["answers"] for row in rows})
    return f"{answers[0]} to {answers[-1]} answers a cell, standard errors up to {worst:.2f}"


def compare_checks() -> str:
    """How many answers were decoded, equal to the replay, and how many parted at ties."""
    rows = [row for own in _counts().values() for row in own.values()]
    keys = "equal_to_replay", "ties", "parted"
    checked, ties, parted = (sum(row.get(key, 0) for row in rows) for key in keys)
    decoded = sum(row.get("decoded", 0) for row in rows)
    return (
        f"{decoded} answers of replayed methods were decoded, too: the rounds of all {checked} that say the "
        "same text are those of the replay. "
        f"Of all decoded texts {parted} part from plain decoding's, {ties} of them at a tie"
    )


def pooled(own: dict[str, dict[str, Any]]) -> list[float]:
    """Survival by depth over all sets' whole rounds."""
    depth = max(len(row["survival"]) for row in own.values())
    total = sum(row["whole_rounds"] for row in own.values())
    alive = [0.0] * depth
    for row in own.values():
        for at, share in enumerate(row["survival"]):
            alive[at] += share * row["whole_rounds"] / total
    return alive


def compare_depth() -> str:
    """Acceptance of each draft after the one before, all sets together."""
    rows = []
    for name in ("lookup", "dflash", "tree:16", "union:16"):
        alive = pooled(_counts()[name])[:7]
        before = [1.0, *alive]
        rows.append([NAMES[name], *(f"{one / two:.2f}" for one, two in zip(alive, before, strict=False))])
    return table(["acceptance of draft", *map(str, range(1, 8))], *rows)


def compare_law() -> str:
    """Tokens a round by the law, fitted at few rows, beside those that were measured."""
    counts, rows = _counts(), []
    small = pooled(counts["dflash:4"])
    wide = statistics.mean(row["tokens_per_round"] for row in counts["dflash"].values())
    mean = statistics.mean(row["tokens_per_round"] for row in counts["dflash:4"].values())
    rows.append(["DFlash", f"4: {mean:.2f}", f"{tokens_by_law(small, 8):.2f} / {wide:.2f}", "", "", "", ""])
    alive, cells = pooled(counts["lookup"]), []
    for width in WIDTHS[1:]:
        found = [row["tokens_per_round"] for row in counts[f"lookup:{width}"].values()]
        cells.append(f"{tokens_by_law(alive, width):.2f} / {statistics.mean(found):.2f}")
    base = statistics.mean(row["tokens_per_round"] for row in counts["lookup"].values())
    rows.append(["lookup", f"8: {base:.2f}", "", *cells])
    return table(["law / measured", "fitted at", *(f"{width} rows" for width in WIDTHS)], *rows)


def compare_walls() -> str:
    """Times plain decoding by set, with quartiles of all prompts."""
    sets = result("compare/walls")["walls"]
    known = [where for where in SETS if where in sets]
    methods = list(sets[known[0]]["methods"])
    rows = []
    for name in methods:
        cells = [sets[where]["methods"][name]["speedup"] for where in known]
        rows.append([NAMES[name], *(f"{cell:.2f}" for cell in cells), f"{statistics.median(cells):.2f}"])
    return table(["times plain, measured", *known, "median"], *rows)


def compare_bytes() -> str:
    """Bytes of each method's own round, in plain rounds, and the bound on its speed."""
    found = result("compare/derived")
    rounds, limits = found["derived"]["methods"], found["bounds"]
    plain = rounds["plain"]["round_bytes"]
    rows = []
    for name, one in rounds.items():
        mean = statistics.mean(limits[name].values())
        cells = f"{one['round_bytes'] / 1e9:.3f}", f"{one['round_bytes'] / one['floor_bytes']:.3f}"
        rows.append([NAMES[name], *cells, f"{one['round_bytes'] / plain:.3f}", f"{mean:.2f}"])
    return table(["derived", "GB a round", "of its floor", "plain rounds", "bound, mean of sets"], *rows)


def compare_bars() -> str:
    """The picture of tokens a round by set."""
    counts = _counts()
    figures = {
        where: {name: counts[name][where]["tokens_per_round"] for name in COLOURS}
        for where in counts["plain"]
    }
    return bars_of(figures, {NAMES[name]: (name, colour) for name, colour in COLOURS.items()})
