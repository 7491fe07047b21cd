"""``aot`` and ``fit-memory``: their shared options, configs and output."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import click

from torch_dflash.checks import positions_of
from torch_dflash.cli.arguments import DRAFTER, target_option
from torch_dflash.cli.command import COUNT, MODEL, option, options_of
from torch_dflash.cli.errors import UserError, one_line, refusing
from torch_dflash.cli.outputs import check_writable, provenance, write_results
from torch_dflash.plan import DecodePlan

STDOUT = "-"
# Fields of the plan that have an option of their own here, change nothing in one round, or are for outputs.
BY_HAND = ("batch_size", "capacity", "block_size", "verify_width", "stop_slots", "rounds_per_chunk")
BY_HAND += ("processors", "outputs", "top_logprobs", "depth")
DRAFTED = "Rows of the draft pass (the drafter's own)."
VERIFIED = "Rows of the verify pass (the whole block)."
PRINTED = "Write all figures there; alone or -: print them."
CONFIG = "Directory, config.json or hub id; of a drafter none or ngram, too."
NEEDS = "Needs configs and libtpu (pip install 'jax[tpu]'), neither weights nor a TPU."

QUANTIZE = option(
    "--quantize",
    type=click.Choice(("int8", "fp8", "mxfp4", "int4")),
    help="Linear weights in int8, or the target's in FP8 with blocks of 128 x 128, experts too, or its "
    "experts in MXFP4 or int4.",
)


def pair_options() -> list[click.Parameter]:
    """``--model`` and ``--draft-model``, by their configs."""
    drafter = option(*DRAFTER, type=MODEL, default="none", metavar="CONFIG", help=CONFIG)
    return [target_option(CONFIG, "CONFIG"), drafter]


def plan_options(without: tuple[str, ...] = ()) -> list[click.Parameter]:
    """The widths, the batch, the fields of `DecodePlan`, and ``--json``."""
    return [
        option("--block-size", "--block", "block", type=COUNT, metavar="W", help=DRAFTED),
        option("--verify-width", "--verify", "verify", type=COUNT, metavar="M", help=VERIFIED),
        option("--context", type=COUNT, default=4096, metavar="N", help="Tokens per row."),
        option("--batch-size", "--batch", "batch", type=COUNT, default=1, metavar="B", help="Rows."),
        *options_of(DecodePlan, without=BY_HAND + without),
        option("--json", is_flag=False, flag_value=STDOUT, metavar="[FILE]", help=PRINTED),
    ]  # fmt: skip


def check_json(arguments: SimpleNamespace) -> None:
    """Raise `UserError` for a ``--json`` file that cannot be written."""
    check_writable(json=None if arguments.json == STDOUT else arguments.json)


def plan_of(arguments: SimpleNamespace) -> dict[str, Any]:
    """The fields of `DecodePlan` that are options here."""
    names = (field.name for field in dataclasses.fields(DecodePlan) if field.name not in BY_HAND)
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def read_configs(arguments: SimpleNamespace) -> tuple[Any, Any]:
    """Read both configs; raises `UserError` for a context or a depth beyond the target's."""
    from torch_dflash.cli.loading import load_configs

    layers = getattr(arguments, "layers", None)
    target, drafter = load_configs(arguments.target, arguments.drafter, arguments.block, layers)
    longest = positions_of(target)
    if arguments.context > longest:
        raise UserError(
            f"--context {arguments.context}: is beyond the target's max_position_embeddings={longest}; "
            "lower it."
        )
    return target, drafter


@contextmanager
def offline(fix: str = "") -> Iterator[None]:
    """Prepares the bridge to compile only, and turns its errors into a `UserError`.

    ``fix``: for a program that does not compile.
    """
    with refusing(ImportError, ValueError, TypeError):
        from jax_bridge.offline import compile_only

        compile_only()
        from jax_bridge.aot.report import CompileError

        try:
            yield
        except CompileError as error:
            raise UserError(f"{one_line(error)} {fix}") from None


def show(results: dict[str, Any], file: str | None, table: Callable[[], str]) -> None:
    """Print a table, or JSON with ``--json``; write JSON to a file with ``--json FILE``."""
    if file == STDOUT:
        _print_json(results)
        return
    if file is not None:
        try:
            write_results(file, results)
        except OSError as error:
            _print_json(results)  # minutes of compiling
            raise UserError(
                f"--json {file}: could not be written ({error.strerror}); the figures went to standard "
                "output."
            ) from None
    print(table())


def _print_json(results: dict[str, Any]) -> None:
    print(json.dumps({"provenance": provenance(), **results}, indent=1))
