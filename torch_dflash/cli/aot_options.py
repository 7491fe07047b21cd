"""Shared parts of ``aot`` and ``fit-memory``: configs read, figures shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from torch_dflash.checks import positions_of
from torch_dflash.cli.configs import load_configs
from torch_dflash.cli.errors import UserError
from torch_dflash.cli.provenance import provenance, write_json
from torch_dflash.cli.tpu_commands import BY_HAND, STDOUT
from torch_dflash.plan import DecodePlan


def plan_of(arguments: SimpleNamespace) -> dict[str, Any]:
    """The plan's fields that were asked for."""
    names = (field.name for field in dataclasses.fields(DecodePlan) if field.name not in BY_HAND)
    return {name: getattr(arguments, name) for name in names if hasattr(arguments, name)}


def read_configs(arguments: SimpleNamespace) -> tuple[Any, Any]:
    """Both configs, and `UserError` for whatever needs no more than them to be refused."""
    layers = getattr(arguments, "layers", None)
    target, drafter = load_configs(arguments.target, arguments.drafter, arguments.block, layers)
    longest = positions_of(target)
    if arguments.context > longest:
        raise UserError(
            f"--context {arguments.context}: is beyond the target's max_position_embeddings={longest}; "
            "lower it."
        )
    return target, drafter


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
