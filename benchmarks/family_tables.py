"""The tables of docs/tables/families.md, and the list of tested classes, from the JSON of `families.py`."""

from __future__ import annotations

from collections import Counter
from typing import Any

RUNS = ("eager static", "eager paged", "xla static", "xla paged")
WEAK = 3
SAME = ("equal", "tie")


def verdict(family: dict[str, Any]) -> str:
    """One word for a case: its worst outcome, with a refusal only where nothing ran."""
    if not family["runs"]:
        return family["outcome"]
    outcomes = [run["outcome"] for run in family["runs"].values()]
    found = [what for what in ("crash", "differs") if what in outcomes]
    return found[0] if found else "equal" if set(outcomes) & set(SAME) else outcomes[0]


def tested(*sweeps: dict[str, Any]) -> str:
    """The tested classes, with and without recurrent layers, and the transformers of these sweeps."""
    used = {".".join(one["provenance"]["packages"]["transformers"].split(".")[:2]) for one in sweeps}
    assert len(used) == 1, f"sweeps with transformers {sorted(used)}"
    found = {
        f"{'recurrent' if 'recurrent' in one else 'attention'} {one['model']}"
        for sweep in sweeps
        for one in sweep["families"].values()
        if verdict(one) == "equal" and one["distinct"] >= WEAK
    }
    return "\n".join([f"transformers {used.pop()}", *sorted(found), ""])


def counts(families: dict[str, Any]) -> str:
    """The number of cases with each verdict."""
    found = Counter(map(verdict, families.values()))
    return f"{len(families)} cases: " + ", ".join(f"{count} {what}" for what, count in found.most_common())


def tables(families: dict[str, Any]) -> str:
    """Counts, then one table for equal cases, one for refused cases, one for the rest."""
    by = {name: verdict(one) for name, one in families.items()}
    parts = [f"{counts(families)}."]
    equal = [_equal(name, families[name]) for name, what in by.items() if what == "equal"]
    parts.append(_table(["case", "class", *RUNS, "drafted by"], equal))
    refused = [[name, families[name]["model"], _why(families[name])] for name in by if by[name] == "refused"]
    parts.append(_table(["refused", "class", "why"], refused))
    others = [name for name, what in by.items() if what not in ("equal", "refused")]
    rest = [[name, families[name].get("model", ""), by[name], _why(families[name])] for name in others]
    parts.append(_table(["not compared", "class", "outcome", "why"], rest))
    return "\n\n".join(filter(None, parts))


def _table(head: list[str], rows: list[list[str]]) -> str:
    if not rows:
        return ""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def _equal(name: str, family: dict[str, Any]) -> list[str]:
    runs = family["runs"]
    proposers = runs["eager static"]["proposers"] if "eager static" in runs else []
    drafted = "DFlash, lookup" if "dflash" in proposers else "lookup"
    if family["distinct"] < WEAK:
        drafted += f" (weak: {family['distinct']} distinct tokens)"
    return [name, family["model"], *(runs.get(run, {"outcome": "-"})["outcome"] for run in RUNS), drafted]


def _why(family: dict[str, Any]) -> str:
    """The first reason given, without the error's class and the model's name, and fit for a cell."""
    details = [run["detail"] for run in family["runs"].values() if "detail" in run]
    for run in family["runs"].values():
        if run["outcome"] == "differs":
            details.append("row {row} token {token}: ours {ours}, theirs {theirs}, by {margin}".format(**run))
    detail = (details or [family.get("detail", "")])[0]
    named = f"target={family.get('model')}: "
    detail = detail.partition("Error: ")[2] or detail
    return detail.removeprefix(named).partition("; supported are")[0].replace("|", "\\|")
