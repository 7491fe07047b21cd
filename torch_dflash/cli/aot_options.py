"""What ``aot`` and ``fit-memory`` share: a pair by its configs, how it decodes, ``--json``."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
from collections.abc import Callable
from typing import Any

from torch_dflash.checks import check_counts, check_precision, positions_of
from torch_dflash.cli.configs import WITHOUT_WEIGHTS, load_configs
from torch_dflash.cli.dataclass_options import add_options
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.provenance import provenance, write_json
from torch_dflash.cli.writable import check_outputs
from torch_dflash.plan import DecodePlan

STDOUT = "-"
# Fields of the plan that have an option of their own here, change nothing in one round, or are for outputs.
BY_HAND = (
    "batch_size",
    "capacity",
    "block_size",
    "verify_width",
    "stop_slots",
    "rounds_per_chunk",
    "processors",
    "outputs",
    "top_logprobs",
)
COUNTS = ("block", "verify", "context", "batch", "layers", "mesh")


def add_pair(parser: argparse.ArgumentParser) -> None:
    """Declare the pair."""
    drafters = ", ".join(WITHOUT_WEIGHTS)
    parser.add_argument("--target", required=True, metavar="CONFIG", help="directory, config.json or hub id")
    parser.add_argument("--drafter", required=True, metavar="CONFIG", help=f"the same, or {drafters}")


def add_plan(parser: argparse.ArgumentParser, without: tuple[str, ...] = ()) -> None:
    """Declare how it decodes, and ``--json``."""
    for name, short, letter, shown in (
        ("--block-size", "block", "W", "rows of the draft pass (the drafter's own)"),
        ("--verify-width", "verify", "M", "rows of the verify pass (the whole block)"),
    ):
        parser.add_argument(name, f"--{short}", dest=short, type=int, metavar=letter, help=shown)
    parser.add_argument("--context", type=int, default=4096, metavar="N", help="tokens per row (%(default)s)")
    parser.add_argument(
        "--batch-size", "--batch", dest="batch", type=int, default=1, metavar="B", help="rows (%(default)s)"
    )
    add_options(parser, DecodePlan, without=BY_HAND + without)
    parser.add_argument(
        "--json",
        nargs="?",
        const=STDOUT,
        metavar="FILE",
        help="write all figures there; alone or -: print them",
    )


def plan_of(arguments: argparse.Namespace) -> dict[str, Any]:
    """The plan's fields that were asked for."""
    names = (field.name for field in dataclasses.fields(DecodePlan) if field.name not in BY_HAND)
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def read_configs(arguments: argparse.Namespace) -> tuple[Any, Any]:
    """Both configs, and `UserError` for whatever needs no more than them to be refused."""
    given = vars(arguments)
    try:
        check_counts(**{name: given[name] for name in COUNTS if name in given})
    except ValueError as error:
        raise UserError(f"--{error}") from None
    try:
        check_precision(arguments.matmul_precision)
    except ValueError as error:
        raise UserError(str(error).replace("matmul_precision=", "--matmul-precision=", 1)) from None
    check_outputs(json=None if arguments.json == STDOUT else arguments.json)
    layers = given.get("layers")
    target, drafter = load_configs(arguments.target, arguments.drafter, arguments.block, layers)
    longest = positions_of(target)
    if arguments.context > longest:
        raise UserError(
            f"--context {arguments.context}: is beyond the target's max_position_embeddings={longest}; "
            "lower it."
        )
    return target, drafter


def say(line: str) -> None:
    """What is being compiled, while it is."""
    print(line, file=sys.stderr, flush=True)


def show(results: dict[str, Any], file: str | None, table: Callable[[], str]) -> None:
    """Results as ``--json`` asks for them, and else as a table."""
    if file == STDOUT:
        _print_json(results)
        return
    if file is not None:
        _write_or_print(file, results)
    print(table())


def _print_json(results: dict[str, Any]) -> None:
    print(json.dumps({"provenance": provenance(), **results}, indent=1))


def _write_or_print(file: str, results: dict[str, Any]) -> None:
    try:
        write_json(file, results)
    except OSError as error:
        _print_json(results)  # minutes of compiling
        raise UserError(
            f"--json {file}: could not be written ({error.strerror}); the figures went to standard output."
        ) from None
