"""Runs a parsed command: its module is imported then, and its errors end in a line and an exit status."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import click

from torch_dflash.cli.errors import UserError, fail, one_line, status_of
from torch_dflash.cli.options import Command, flag

PROGRAM = "torch-dflash"


@dataclass(frozen=True)
class Invocation:
    """A command line that was parsed: ``run(arguments)`` of ``module`` does what it asks for."""

    name: str
    module: str
    arguments: SimpleNamespace

    def __call__(self) -> int:
        """Run it; returns the exit status."""
        return status_of(self.name, self._run)

    def _run(self) -> int:
        from torch_dflash.progress import quiet

        with quiet(self.arguments.quiet):
            run = import_module(self.module).run
            warnings.showwarning = tell_warning
            if self.arguments.quiet:
                hush()
            status = run(self.arguments)
        sys.stdout.flush()  # a reader that has left is noticed here, not when the interpreter ends
        return status


def quiet_flag() -> click.Option:
    """``--quiet``, of each command and of each group before one."""
    return flag("-q", "--quiet", help="Only errors on stderr: no bars, notes or statistics.")


def command(
    name: str,
    params: list[click.Parameter],
    help: str,
    more: str = "",
    module: str | None = None,
    check: Callable[[SimpleNamespace], Any] | None = None,
) -> Command:
    """A command that makes a `Invocation` of ``torch_dflash.cli.<name>``.

    Args:
        params: what it takes, besides ``--quiet``.
        help: one sentence, in the list of commands too. more: what follows it in the command's own help.
        module: of the package ``torch_dflash.cli``; unset: named like the command.
        check: raises `UserError` for arguments that need no model to be refused.
    """

    def made(**values: Any) -> Invocation | int:
        context = click.get_current_context()
        path = context.command_path.removeprefix(PROGRAM).strip()
        arguments = SimpleNamespace(command=name, **values)
        while context := context.parent:
            arguments.quiet |= context.params["quiet"]
        try:
            if check is not None:
                check(arguments)
        except UserError as error:
            return fail(path, error)
        return Invocation(path, f"torch_dflash.cli.{module or name.replace('-', '_')}", arguments)

    text = f"{help}\n\n{more}" if more else help
    return Command(name, params=[*params, quiet_flag()], help=text, short_help=help, callback=made)


def tell_warning(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning as a line of a command, above its bars."""
    from tqdm import tqdm

    tqdm.write(f"{PROGRAM}: {one_line(str(message))}", file=sys.stderr)


def hush() -> None:
    """Silence warnings, and bars and notes of transformers and the hub, where the command imported them."""
    warnings.simplefilter("ignore")
    if "transformers" in sys.modules:
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()
    if "huggingface_hub" in sys.modules:
        from huggingface_hub.utils import disable_progress_bars
        from huggingface_hub.utils import logging as hub

        hub.set_verbosity_error()
        disable_progress_bars()
