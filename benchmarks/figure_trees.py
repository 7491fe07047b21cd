"""The results of `trees.py`: a table, and a picture of tokens a round over the rows of a verify pass."""

from __future__ import annotations

from typing import Any

from figure_bars import NAMES
from figure_text import result, table

ROWS = (4, 8, 16, 32, 64)
COLOURS = {"gsm8k": "#2a7f62", "mbpp": "#e0a458", "humaneval": "#3867a8", "mt-bench": "#9a4f7c"}
LEFT, TOP, STEP, UNIT = 44, 56, 96, 90  # pixels; STEP: of a doubling of the rows; UNIT: of one token
CHAINS = ("drafter", "union")
FORMS = (*CHAINS, *(f"{form} of {rows}" for form in ("tree", "union") for rows in (8, 16, 64)))


def tree_rows(name: str = "trees") -> str:
    """Tokens a round by set and form, and the ratio to the drafter's chain."""
    found, rows = result(name)["tokens a round"], []
    for key, own in found.items():
        cells = (f"{own[form]:.2f} ({own[form] / own['drafter']:.2f})" for form in FORMS)
        rows.append([NAMES[key], *cells])
    heads = (f"chain, {form}" if form in CHAINS else form for form in FORMS)
    return table(["tokens a round", *heads], *rows)


def curves(figures: dict[str, Any]) -> str:
    """The SVG of trees, dashed, and unions, whole; the drafter's chain of 8 rows is a dot."""
    found = figures["tokens a round"]
    most = max(max(own.values()) for own in found.values())
    width, height = LEFT + STEP * (len(ROWS) - 1) + 120, TOP + round(most * UNIT) + 40

    def place(rows: int, value: float) -> tuple[int, int]:
        return LEFT + STEP * ROWS.index(rows), height - 40 - round(value * UNIT)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#1f2933" role="img">',
        "<title>Tokens a round over the rows of a verify pass, by prompt set: trees and unions</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        '<text x="12" y="20" font-size="14" font-weight="bold">Tokens a round, by its rows</text>',
        '<text x="12" y="40">whole: lookup and drafter; dashed: the drafter alone; dot: its chain</text>',
    ]
    for rows in ROWS:
        across, low = place(rows, 0)
        parts.append(f'<text x="{across}" y="{low + 24}" text-anchor="middle">{rows}</text>')
    for tokens in range(1, int(most) + 1):
        across, high = place(ROWS[0], tokens)
        parts.append(f'<path d="M{across} {high}H{width - 120}" stroke="#d6dbe0"/>')
        parts.append(f'<text x="{across - 10}" y="{high + 4}" text-anchor="end">{tokens}</text>')
    for name, own in found.items():
        colour = COLOURS[name]
        for form, dashes in (("tree", ' stroke-dasharray="5 4"'), ("union", "")):
            points = [place(rows, own[f"{form} of {rows}"]) for rows in ROWS]
            line = " ".join(f"{x},{y}" for x, y in points)
            parts.append(
                f'<polyline points="{line}" fill="none" stroke="{colour}" stroke-width="2"{dashes}/>'
            )
        across, high = place(8, own["drafter"])
        parts.append(f'<circle cx="{across}" cy="{high}" r="4" fill="{colour}"/>')
        parts.append(
            f'<text x="{points[-1][0] + 8}" y="{points[-1][1] + 4}" fill="{colour}">{NAMES[name]}</text>'
        )
    return "\n".join([*parts, "</svg>"]) + "\n"
