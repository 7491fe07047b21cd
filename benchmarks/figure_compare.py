"""The results of ``torch-dflash bench`` and ``compare.py fit``: tables, and three pictures."""

from __future__ import annotations

import math
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
FIT_COLOURS = {"eagle3": "#9a4f7c", "medusa": "#e0a458", "dflash": "#2a7f62", "dflash2": "#3f6fb5"}
FIT_COLOURS |= {"dflash-16": "#6fb59b", "dflash-32": "#9aa5b1"}
WIDTHS = 8, 16, 32, 64, 128


def _counts() -> dict[str, dict[str, Any]]:
    """By method and set, the counted rows."""
    sets = result("compare/bench")["counts"]
    methods = list(dict.fromkeys(method for one in sets.values() for method in one["methods"]))
    return {
        method: {where: sets[where]["methods"][method] for where in SETS if method in sets[where]["methods"]}
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
    """Answers that were decoded, equal to the replay, and those that parted, by whose decoding."""
    counts = _counts()
    theirs = [row for name, own in counts.items() if name.startswith("hf") for row in own.values()]
    ours = [row for name, own in counts.items() if not name.startswith("hf") for row in own.values()]
    checked, decoded = (sum(row.get(key, 0) for row in ours) for key in ("equal_to_replay", "decoded"))
    parted, ties = ([sum(row[key] for row in rows) for rows in (ours, theirs)] for key in ("parted", "ties"))
    return (
        f"{decoded} answers of replayed methods were decoded, too: the rounds of all {checked} that say the "
        f"same text are those of the replay. Of all decoded texts {parted[0]} of ours part from plain "
        f"decoding's, {ties[0]} of them at a tie of bfloat16, and {parted[1]} of transformers' own calls, "
        f"{ties[1]} of them at a tie"
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


def compare_law() -> str:
    """Tokens a round by the law, fitted at few rows, beside those that were measured."""
    counts, rows = _counts(), []
    assert set(counts["dflash:4"]) == set(counts["dflash"])
    small = pooled(counts["dflash:4"])
    wide = statistics.mean(row["tokens_per_round"] for row in counts["dflash"].values())
    mean = statistics.mean(row["tokens_per_round"] for row in counts["dflash:4"].values())
    rows.append(["DFlash", f"4: {mean:.2f}", f"{tokens_by_law(small, 8):.2f} / {wide:.2f}", "", "", "", ""])
    some = [
        {where: counts[f"lookup:{width}"][where] for where in SETS if where in counts[f"lookup:{width}"]}
        for width in WIDTHS[1:]
    ]
    narrow = {where: counts["lookup"][where] for where in some[0]}
    cells = []
    for width, own in zip(WIDTHS[1:], some, strict=True):
        found = statistics.mean(row["tokens_per_round"] for row in own.values())
        cells.append(f"{tokens_by_law(pooled(narrow), width):.2f} / {found:.2f}")
    base = statistics.mean(row["tokens_per_round"] for row in narrow.values())
    rows.append([f"lookup, {' and '.join(narrow)}", f"8: {base:.2f}", "", *cells])
    return table(["law / measured", "fitted at", *(f"{width} rows" for width in WIDTHS)], *rows)


def compare_walls() -> str:
    """Times plain decoding by set, with quartiles of all prompts."""
    sets = result("compare/bench")["walls"]
    known = [where for where in SETS if where in sets]
    methods = list(sets[known[0]]["methods"])
    rows = []
    for name in methods:
        cells = [sets[where]["methods"][name]["speedup"] for where in known]
        rows.append([NAMES[name], *(f"{cell:.2f}" for cell in cells), f"{statistics.median(cells):.2f}"])
    return table(["times plain, measured", *known, "median"], *rows)


def compare_bytes() -> str:
    """Bytes of each method's own round, in plain rounds, and the bound on its speed."""
    found = result("compare/bench")
    rounds, limits = found["derived"]["methods"], found["bounds"]
    plain = rounds["plain"]["round_bytes"]
    rows = []
    for name, one in rounds.items():
        mean = statistics.mean(limits[name].values())
        cells = f"{one['round_bytes'] / 1e9:.3f}", f"{one['round_bytes'] / one['floor_bytes']:.3f}"
        rows.append([NAMES[name], *cells, f"{one['round_bytes'] / plain:.3f}", f"{mean:.2f}"])
    return table(["derived", "GB a round", "of its floor", "plain rounds", "bound, mean of sets"], *rows)


def compare_dollars() -> str:
    """Dollars a million tokens on one v5p chip, by derived speed; the price stands in the head."""
    cost = result("compare/bench")["dollars"]
    place = f"{cost['chips']} x ${cost['price_per_chip_hour']:.2f} an hour, batch {cost['batch']}"
    head = f"dollars a million tokens, derived, {place}"
    known = [where for where in SETS if where in cost["derived"]["plain"]]
    rows = [[NAMES[name], *(f"{own[where]:.3f}" for where in known)] for name, own in cost["derived"].items()]
    return table([head, *known], *rows)


def compare_methods() -> str:
    """Bytes of a round of each method on two published targets, in plain rounds."""
    found = result("compare/methods_aot")["rounds"]
    columns = [(pair, place) for pair, places in found.items() for place in places]
    rows = []
    for name in next(iter(next(iter(found.values())).values())):
        cells = []
        for pair, place in columns:
            one = found[pair][place].get(name)
            cells.append(
                f"{one['plain_rounds']:.3f} ({one['round_bytes'] / one['floor_bytes']:.3f})" if one else ""
            )
        rows.append([name, *cells])
    return table(
        ["plain rounds (of its floor)", *(f"{pair}, {place.partition(':')[0]}" for pair, place in columns)],
        *rows,
    )


def compare_fits() -> str:
    """Each fit's best checkpoint, and what it cost."""
    rows = []
    for name, one in result("compare/fit")["fits"].items():
        best = one["best"]
        rows.append([
            name,
            one["drafts"],
            f"{one['weights'] / 1e6:.1f} M",
            f"{one['draft_bytes'] / 1e6:.0f} MB",
            f"{one['training_flops'] / 1e12:.1f}",
            f"{one['learning_rate']:g}",
            f"{best['acceptance_length']:.3f}",
            f"{best['tokens']:,}",
        ])  # fmt: skip
    head = ["drafter", "drafts", "weights", "read a round", "TFLOP of the fit", "learning rate"]
    return table([*head, "held-out acceptance length", "after answer tokens"], *rows)


def compare_bundled() -> str:
    """The bundled drafter, and itself with DFlash2's parts after two further fits."""
    counted = {
        "bundled": result("compare/bench")["counts"],
        "with DFlash2's parts": result("compare/bundled")["counts"],
        "these alone trained": result("compare/bundled_frozen")["counts"],
    }
    shown = [name for name in SETS if name in counted["with DFlash2's parts"]]
    rows = []
    for form, name in ("chain", "dflash"), ("union of 8", "union:8"):
        for drafter, counts in counted.items():
            own = "dflash2" if name == "dflash" and drafter != "bundled" else name
            found = [counts[where]["methods"][own]["tokens_per_round"] for where in shown]
            rows.append([drafter, form, *(f"{one:.2f}" for one in found)])
    return table(["drafter", "form", *shown], *rows)


def compare_fit_title() -> str:
    """The title of the fits' figure: methods, budget, target."""
    found = result("compare/fit")
    return f"{found['title']}, {found['steps']} steps over {found['sequences']} sequences"


def compare_bars() -> str:
    """The picture of tokens a round by set."""
    counts = _counts()
    figures = {
        where: {name: counts[name][where]["tokens_per_round"] for name in COLOURS}
        for where in counts["plain"]
    }
    return bars_of(figures, {NAMES[name]: (name, colour) for name, colour in COLOURS.items()})


def compare_depths() -> str:
    """The picture of the acceptance of each draft after the one before, all sets together."""
    lines = {}
    for name in ("lookup", "dflash", "tree:16", "union:16"):
        alive = pooled(_counts()[name])[:7]
        before = [1.0, *alive]
        lines[NAMES[name], COLOURS[name]] = [
            (depth, now / then) for depth, (now, then) in enumerate(zip(alive, before, strict=False), 1)
        ]
    return lines_of("Acceptance of a draft after the one before", "draft", lines, least=0.0)


def compare_curves() -> str:
    """The picture of held-out acceptance by answer tokens seen, each drafter from nothing."""
    found = result("compare/fit")
    lines = {
        (name, FIT_COLOURS[name]): [
            (point["tokens"] / 1000, point["acceptance_length"]) for point in one["curve"]
        ]
        for name, one in found["fits"].items()
    }
    title = "Held-out acceptance length" + ("" if found["converged"] else ", not converged")
    return lines_of(title, "thousands of answer tokens seen", lines, least=1.0)


def lines_of(
    title: str, across: str, lines: dict[tuple[str, str], list[tuple[float, float]]], *, least: float
) -> str:
    """An SVG of ``lines``: by name and colour the points, (across, up); ``least``: the lowest value shown."""
    points = [point for line in lines.values() for point in line]
    first, last = min(x for x, _ in points), max(x for x, _ in points)
    most = max(y for _, y in points)
    step = next(size for size in (0.05, 0.1, 0.2, 0.5, 1.0) if (most - least) / size <= 8)
    marks = [least + step * at for at in range(math.ceil((most - least) / step - 1e-9) + 1)]
    width, height, left, low = 560, 300, 44, 256

    def place(x: float, y: float) -> tuple[float, float]:
        up = (y - least) / (marks[-1] - least) * (low - 40)
        return round(left + (x - first) / (last - first) * 360, 1), round(low - up, 1)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#1f2933" role="img">',
        f"<title>{title}, by {across}</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">{title}</text>',
        f'<text x="{left + 180}" y="{height - 8}" text-anchor="middle">{across}</text>',
    ]
    for mark in marks:
        _, high = place(first, mark)
        parts.append(f'<path d="M{left} {high}H{left + 360}" stroke="#d6dbe0"/>')
        parts.append(f'<text x="{left - 6}" y="{high + 4}" text-anchor="end">{mark:.3g}</text>')
    for value in (first, (first + last) / 2, last):
        x, _ = place(value, least)
        parts.append(f'<text x="{x}" y="{low + 18}" text-anchor="middle">{value:,.0f}</text>')
    ends = sorted((place(*line[-1])[1], name, colour) for (name, colour), line in lines.items())
    free = 0.0
    for (_, colour), line in lines.items():
        shown = " ".join(f"{x},{y}" for x, y in (place(*point) for point in line))
        parts.append(f'<polyline points="{shown}" fill="none" stroke="{colour}" stroke-width="2"/>')
    for high, name, colour in ends:
        free = max(free + 14, high + 4)
        parts.append(f'<text x="{left + 368}" y="{free}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
