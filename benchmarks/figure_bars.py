"""Tokens a target pass as bars, by prompt set and method: SVGs of a few kilobytes."""

from __future__ import annotations

from typing import Any
from xml.sax.saxutils import escape

NAMES = {"gsm8k": "GSM8K", "mbpp": "MBPP", "humaneval": "HumanEval", "mt-bench": "MT-Bench"}
METHODS = {
    "plain decoding": ("plain", "#9aa5b1"),
    "n-gram lookup": ("lookup", "#e0a458"),
    "DFlash": ("drafter", "#2a7f62"),
    "both in a tree of 8 rows": ("union of 8", "#3f6fb5"),
}
"""A method's name in the picture: its name in the figures, and its colour."""
LEFT, BAR, GAP, TOP, UNIT = 92, 14, 14, 62, 190  # pixels; UNIT: of one token


def bars(figures: dict[str, Any]) -> str:
    """The SVG for the JSON of ``benchmarks/trees.py``."""
    return bars_of({name: row | {"plain": 1.0} for name, row in figures["tokens a round"].items()}, METHODS)


def bars_of(sets: dict[str, dict[str, float]], methods: dict[str, tuple[str, str]]) -> str:
    """The SVG of ``sets``, by name the tokens of each form; ``methods``: by name a form and its colour."""
    longest = max(row[form] for row in sets.values() for form, _ in methods.values())
    group = len(methods) * BAR + GAP
    width, height = LEFT + round(longest * UNIT) + 60, TOP + len(sets) * group + 6
    target = "SmolLM2-135M-Instruct"
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" '
        f'height="{height}" font-family="sans-serif" font-size="12" fill="#1f2933" role="img">',
        f"<title>Tokens per target pass: {escape(target)}, greedy, by prompt set and method</title>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
        f'<text x="12" y="20" font-size="14" font-weight="bold">Tokens per target pass '
        f"({escape(target)}, greedy)</text>",
    ]
    at = 12
    for method, (_, colour) in methods.items():
        parts.append(f'<rect x="{at}" y="33" width="12" height="12" fill="{colour}"/>')
        parts.append(f'<text x="{at + 18}" y="43">{method}</text>')
        at += 36 + 7 * len(method)
    for number, (name, row) in enumerate(sets.items()):
        top = TOP + number * group
        middle = top + len(methods) * BAR // 2 + 4
        parts.append(f'<text x="{LEFT - 8}" y="{middle}" text-anchor="end">{NAMES.get(name, name)}</text>')
        for place, (form, colour) in enumerate(methods.values()):
            value = row[form]
            y, long = top + place * BAR, round(value * UNIT)
            parts.append(f'<rect x="{LEFT}" y="{y}" width="{long}" height="{BAR - 2}" fill="{colour}"/>')
            parts.append(f'<text x="{LEFT + long + 5}" y="{y + 10}" font-size="11">{value:.2f}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"
