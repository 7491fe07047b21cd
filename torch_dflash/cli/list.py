"""``torch-dflash list``: the published pairs, and what of them the hub's cache holds."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from dataclasses import asdict
from typing import Any

from torch_dflash.cli.errors import UserError, fail, hang_up
from torch_dflash.published.check import Checked, check_cached
from torch_dflash.published.rows import Checkpoint, checkpoints, share

DECODED = {True: "yes", False: "no", None: "?"}
HEADS = ("name", "target", "drafter", "kind", "layout", "block", "taps", "decodes")
DIFFERS = 1


def add_parser(commands) -> None:
    """Declare the subcommand."""
    parser = commands.add_parser(
        "list",
        help="show the published pairs of target and drafter",
        description="Shows the pairs that are known, one a line; ? is unknown. With --check, loads and "
        "checks those whose drafter the hub's cache holds; nothing is fetched. Exit status: 0, 1 if one of "
        "those does not load or fit, 2 wrong usage.",
    )
    add = parser.add_argument
    add("name", nargs="?", metavar="TEXT", help="only pairs with this in their names")
    add("--json", action="store_true", help="print every field, its source and what is unknown")
    add("--check", action="store_true", help="load and check what the hub's cache holds")
    add("--cache-dir", metavar="DIR", help="a hub cache other than huggingface_hub's own, for --check")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Print the pairs; returns the exit status."""
    try:
        if arguments.cache_dir is not None and not arguments.check:
            raise UserError(f"--cache-dir {arguments.cache_dir}: it is for --check; pass that too.")
        wanted = str(arguments.name or "").lower()
        rows = [row for row in checkpoints if wanted in row.name]
        if not rows:
            raise UserError(f"{arguments.name}: no pair has that in its name; leave it out to see all.")
        if arguments.check:
            return _check(rows, arguments)
        print(json.dumps([as_json(row) for row in rows], indent=1) if arguments.json else table(rows))
        if len(rows) == len(checkpoints):
            print(f"{share()}.", file=sys.stderr)
        return 0
    except UserError as error:
        return fail("list", error)
    except BrokenPipeError:
        return hang_up()


def table(rows: Iterable[Checkpoint]) -> str:
    """The pairs in columns, ``?`` where something is unknown."""
    lines = [HEADS, *map(_cells, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


def as_json(row: Checkpoint) -> dict[str, Any]:
    """A pair with all of its fields, null where they are unknown."""
    decodes, why_not = row.verdict
    return asdict(row) | {"decodes": decodes, "why_not": why_not, "unknown": list(row.unknown)}


def _cells(row: Checkpoint) -> tuple[str, ...]:
    taps = "?" if row.target_layer_ids is None else ",".join(map(str, row.target_layer_ids))
    block = "?" if row.block_size is None else str(row.block_size)
    named = row.target or f"({row.model})"
    decodes, _ = row.verdict
    return row.name, named, row.drafter or "?", row.kind, row.layout or "?", block, taps, DECODED[decodes]


def _check(rows: list[Checkpoint], arguments: argparse.Namespace) -> int:
    try:
        found = check_cached(rows, arguments.cache_dir)
    except OSError as error:
        raise UserError(f"--check: {error}") from None
    if arguments.json:
        print(json.dumps([asdict(one) for one in found], indent=1))
    else:
        _tell(found)
    return DIFFERS if any(one.problem for one in found) else 0


def _tell(found: list[Checked]) -> None:
    there = [one for one in found if one.cached]
    for one in there:
        fits = "loads and fits" if one.compared else "loads"
        print(f"{one.name}: {one.problem or fits}")
        for word in one.notes:
            print(f"  {word}")
    absent = [one.name for one in found if not one.cached]
    print(f"checked {len(there)} of {len(found)} pairs; {len(absent)} are not in the cache.")
    if absent:
        print(f"not in the cache: {', '.join(absent)}", file=sys.stderr)
