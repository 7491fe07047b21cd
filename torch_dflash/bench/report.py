"""Figures made of counts, walls and bytes: the law of the width, bounds, dollars, and the printed tables."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

MILLION = 1_000_000


def tokens_by_law(survival: list[float], width: int) -> float:
    """Tokens a round of ``width`` rows: ``1 + a1 (1 - a^(width - 1)) / (1 - a)``.

    ``a1`` is the first draft's acceptance, ``a`` each later draft's after the one before, the mean of those
    in ``survival``. Fitted at a small width the law overstates wide ones: wide rounds meet easy places less
    often.
    """
    first = survival[0] if survival else 0.0
    later = sum(survival[1:]) / sum(survival[:-1]) if sum(survival[:-1]) else 0.0
    reached = width - 1 if later == 1 else (1 - later ** (width - 1)) / (1 - later)
    return 1 + first * reached


def dollars(price: float, chips: int, tokens_per_second: float) -> float:
    """Dollars a million tokens, of ``chips`` at ``price`` dollars an hour each."""
    return price * chips / 3600 / tokens_per_second * MILLION


def bounds(results: dict[str, Any]) -> dict[str, dict[str, float]]:
    """By method and set: tokens a round times plain bytes over the round's, the most that bytes allow."""
    rounds = results["derived"]["methods"]
    plain = rounds["plain"]["round_bytes"]
    found: dict[str, dict[str, float]] = {}
    for name, figures in rounds.items():
        for where, counted in results["counts"].items():
            row = counted["methods"].get(name)
            if row and row["tokens_per_round"]:
                tau = row["tokens_per_round"]
                found.setdefault(name, {})[where] = round(tau * plain / figures["round_bytes"], 3)
    return found


def add_dollars(results: dict[str, Any], price: float, chips: int) -> None:
    """Put dollars a million tokens into ``results``: measured ones and derived ones in places of their own.

    Both are of one text at a time, batch 1.
    """
    measured: dict[str, dict[str, float]] = {}
    for where, found in results["walls"].items():
        for name, row in found["methods"].items():
            if row["seconds_per_token"]:
                cost = dollars(price, chips, 1 / row["seconds_per_token"])
                measured.setdefault(name, {})[where] = round(cost, 4)
    derived: dict[str, dict[str, float]] = {}
    for name, figures in results.get("derived", {}).get("methods", {}).items():
        for where, counted in results["counts"].items():
            row = counted["methods"].get(name)
            if row and row["tokens_per_round"]:
                speed = row["tokens_per_round"] / (figures["roofline_ms"] / 1000)
                derived.setdefault(name, {})[where] = round(dollars(price, chips, speed), 4)
    results["dollars"] = {"price_per_chip_hour": price, "chips": chips, "batch": 1}
    results["dollars"] |= {"measured": measured, "derived": derived}


def tables(results: dict[str, Any]) -> str:
    """All figures of ``results`` as text, each kind in a table of its own."""
    lines = _table(
        "counted: tokens a round",
        {
            where: {name: row["tokens_per_round"] for name, row in counted["methods"].items()}
            for where, counted in results["counts"].items()
        },
    )
    lines += [_notes(results)]
    if results["walls"]:
        title = "measured: times plain decoding, median of prompts in turn, batch 1"
        walls = {
            where: {name: row["speedup"] for name, row in found["methods"].items()}
            for where, found in results["walls"].items()
        }
        lines += ["", *_table(title, walls)]
    if "derived" in results:
        derived = results["derived"]
        title = f"derived: the most that bytes allow on {derived['topology']} at {derived['context']} tokens"
        lines += ["", *_table(f"{title}, times plain decoding, batch 1", _turned(results["bounds"]))]
    cost = results.get("dollars")
    for kind in ("measured", "derived"):
        if cost and cost[kind]:
            place = f"{cost['chips']} x ${cost['price_per_chip_hour']} an hour, batch {cost['batch']}"
            lines += ["", *_table(f"{kind}: dollars a million tokens, {place}", _turned(cost[kind]))]
    return "\n".join(lines)


def _notes(results: dict[str, Any]) -> str:
    rows = [row for counted in results["counts"].values() for row in counted["methods"].values()]
    parted, ties = (sum(row[name] for row in rows) for name in ("parted", "ties"))
    left_out = sum(counted["left_out"] for counted in results["counts"].values())
    notes = f"{parted} decoded texts part from plain decoding's, {ties} of them at a tie"
    notes += f"; {left_out} questions beyond the longest prompt were left out."
    names = {name for counted in results["counts"].values() for name in counted["methods"]}
    theirs = any(name.startswith("hf") for name in names)
    few = results.get("options", {}).get("decoded")
    return notes + (f" hf rows are of the first {few} answers of each set." if theirs and few else "")


def _turned(by_method: dict[str, dict[str, float]]) -> dict[str, dict[str, float]]:
    sets = list(dict.fromkeys(where for row in by_method.values() for where in row))
    return {where: {name: row[where] for name, row in by_method.items() if where in row} for where in sets}


def _table(title: str, by_set: Mapping[str, Mapping[str, float | None]]) -> list[str]:
    """A row a method, a column a set, and the mean of the sets where all have a figure."""
    names = list(dict.fromkeys(name for row in by_set.values() for name in row))
    wide = max([12, *map(len, names)])
    lines = [title, f"{'':{wide}}" + "".join(f"{where[:10]:>11}" for where in by_set) + f"{'mean':>8}"]
    for name in names:
        cells = [row.get(name) for row in by_set.values()]
        known = [cell for cell in cells if cell is not None]
        mean = f"{statistics.mean(known):>8.2f}" if len(known) == len(cells) else f"{'-':>8}"
        shown = "".join(f"{'-':>11}" if cell is None else f"{cell:>11.2f}" for cell in cells)
        lines.append(f"{name:{wide}}{shown}{mean}")
    return lines
