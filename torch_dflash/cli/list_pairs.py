"""``torch-dflash list``: the published pairs, and a check of those in the hub's cache."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict
from types import SimpleNamespace
from typing import Any

import click

from torch_dflash.cli.command import FILE, command, flag, option, silence
from torch_dflash.cli.errors import UserError, refusing
from torch_dflash.integrations.vllm.refusals import refused_pair
from torch_dflash.progress import print_status
from torch_dflash.published.rows import Checkpoint, checkpoints, share

DECODED = {True: "yes", False: "no", None: "?"}
HEADS = ("name", "target", "drafter", "kind", "layout", "block", "taps", "decodes")
DIFFERS = 1


def _check(arguments: SimpleNamespace) -> None:
    if arguments.cache_dir is not None and not arguments.check:
        raise UserError(f"--cache-dir {arguments.cache_dir}: it is for --check; pass that too.")
    if arguments.vllm and arguments.check:
        raise UserError("--vllm: --check asks another question; leave one of them out.")


@command(
    "list",
    [
        click.Argument(["name"], required=False, metavar="[TEXT]"),
        flag("--decodes", help="Only pairs that decode here."),
        flag("--vllm", help="Say whether the vLLM plug-in takes each pair, and why not."),
        flag("--json", help="Print every field, its source and what is unknown."),
        flag("--check", help="Load and check what the hub's cache holds."),
        option("--cache-dir", type=FILE, metavar="DIR",
               help="A hub cache other than huggingface_hub's own, for --check."),
    ],
    "Show the published pairs of target and drafter.",
    "Shows the pairs with TEXT in their names, targets or drafters, one a line; ? is unknown. With --check, "
    "loads and checks those whose drafter the hub's cache holds; nothing is fetched. Exit status: 0, 1 if "
    "one of those does not load or fit, 2 wrong usage or no pair.",
    check=_check,
)  # fmt: skip
def run(arguments: SimpleNamespace) -> int:
    """Print the pairs; returns the exit status."""
    text = arguments.name or ""
    rows = [row for row in checkpoints if row.mentions(text)]
    if not rows:
        raise UserError(f"{text}: no pair has that in its name, target or drafter; leave it out to see all.")
    if arguments.decodes:
        rows, known = [row for row in rows if row.verdict[0]], len(rows)
        if not rows:
            raise UserError(
                f"{text}: no such pair decodes here; leave --decodes out to see {known} that do not."
            )
    if arguments.check:
        return _load_cached(rows, arguments)
    vllm = bool(arguments.vllm)
    print(json.dumps([_fields(row, vllm) for row in rows], indent=1) if arguments.json else table(rows, vllm))
    if len(rows) == len(checkpoints):
        taken = sum(refused_pair(row) is None for row in rows)
        print_status(f"The vLLM plug-in takes {taken} of {len(rows)}." if vllm else f"{share()}.")
    return 0


def table(rows: Iterable[Checkpoint], vllm: bool = False) -> str:
    """The pairs in columns, ``?`` where something is unknown; ``vllm``: with the plug-in's verdict."""
    lines = [HEADS, *map(_cells, rows)]
    if vllm:
        lines = [(*HEADS, "vllm"), *((*_cells(row), refused_pair(row) or "yes") for row in rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def _fields(row: Checkpoint, vllm: bool = False) -> dict[str, Any]:
    decodes, why_not = row.verdict
    more = {"vllm": refused_pair(row) is None, "vllm_why_not": refused_pair(row)} if vllm else {}
    return asdict(row) | {"decodes": decodes, "why_not": why_not, "unknown": list(row.unknown)} | more


def _cells(row: Checkpoint) -> tuple[str, ...]:
    taps = "?" if row.target_layer_ids is None else ",".join(map(str, row.target_layer_ids))
    block = "?" if row.block_size is None else str(row.block_size)
    named = row.target or f"({row.model})"
    decodes, _ = row.verdict
    return row.name, named, row.drafter or "?", row.kind, row.layout or "?", block, taps, DECODED[decodes]


def _load_cached(rows: list[Checkpoint], arguments: SimpleNamespace) -> int:
    from torch_dflash.published.check import check_cached

    if arguments.quiet:
        silence()
    with refusing(OSError, before="--check: "):
        found = check_cached(rows, arguments.cache_dir)
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        _report(found)
    return DIFFERS if any(one.problem for one in found) else 0


def _report(found: list[Any]) -> None:
    there = [one for one in found if one.cached]
    for one in there:
        fits = "loads and fits" if one.compared else "loads"
        print(f"{one.name}: {one.problem or fits}")
        for word in one.notes:
            print(f"  {word}")
    absent = [one.name for one in found if not one.cached]
    print(f"checked {len(there)} of {len(found)} pairs; {len(absent)} are not in the cache.")
    if absent:
        print_status(f"not in the cache: {', '.join(absent)}")
