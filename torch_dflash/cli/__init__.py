"""The ``torch-dflash`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from torch_dflash.cli.call import PROGRAM, Call
from torch_dflash.cli.commands import root
from torch_dflash.cli.errors import INTERRUPTED, fail


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the process's exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called: what is said goes nowhere
            setattr(sys, name, Path(os.devnull).open("w", errors="backslashreplace"))
    asked = parse(argv)
    if not isinstance(asked, Call):
        return asked or 0
    import atexit
    import gc

    atexit.register(gc.freeze)  # the process ends: to collect a million objects would take a second
    return asked()


def parse(argv: Sequence[str] | None = None) -> Call | int | None:
    """The `Call` that the words ask for, or the exit status of an answer that is given already."""
    try:
        return root.main(None if argv is None else list(argv), PROGRAM, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.UsageError as error:
        return _refuse(error)
    except click.Abort:
        return INTERRUPTED


def _refuse(error: click.UsageError) -> int:
    path = PROGRAM if error.ctx is None else error.ctx.command_path
    near: list[str] = getattr(error, "possibilities", None) or []  # the nearest first
    message = error.message if near else error.format_message()
    if isinstance(error, click.NoSuchOption):  # whose words differ by click's version
        message = f"No such option {error.option_name!r}."
    message += f" Did you mean {near[0]}?" if near else ""
    return fail(path.removeprefix(PROGRAM).strip(), message if near else f"{message} See {path} --help.")
