"""The ``torch-dflash`` command."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path

import click

from torch_dflash import __version__
from torch_dflash.cli import (
    aot,
    bench,
    chat,
    demo,
    doctor,
    env,
    fit_memory,
    generate,
    list_pairs,
    selftest,
    serve,
)  # fmt: skip
from torch_dflash.cli.command import PROGRAM, Invocation, flag, quiet_flag
from torch_dflash.cli.errors import INTERRUPTED, fail, status_of
from torch_dflash.cli.train import train

COMMANDS = aot, bench, chat, demo, doctor, env, fit_memory, generate, list_pairs, selftest, serve


def _version(ctx: click.Context, _: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"{PROGRAM} {__version__}")
        ctx.exit()


root = click.Group(
    PROGRAM,
    params=[
        flag("--version", help="Print the version.", is_eager=True, expose_value=False, callback=_version),
        quiet_flag(),
    ],
    commands=[*(one.run for one in COMMANDS), train],
    help="DFlash: block-diffusion speculative decoding for PyTorch.",
    context_settings={
        "help_option_names": ["-h", "--help"],
        "max_content_width": 110,
        "token_normalize_func": lambda word: word.lower().replace("_", "-"),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the process's exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by the caller
            setattr(sys, name, Path(os.devnull).open("w", errors="backslashreplace"))
    parsed = status_of("", lambda: parse(argv))
    if not isinstance(parsed, Invocation):
        return parsed or 0
    import atexit

    atexit.register(leave_garbage)
    return parsed()


def leave_garbage() -> None:
    """Keep the interpreter from collecting a million objects at its end, which would take a second.

    Not with Triton, of torch's CUDA builds, which prints a page of leaks if it is not collected.
    """
    if "triton" not in sys.modules:
        import gc

        gc.freeze()


def parse(argv: Sequence[str] | None = None) -> Invocation | int | None:
    """The `Invocation` of a command line, or an exit status: of help, the version or an error."""
    words = sys.argv[1:] if argv is None else list(argv)
    try:
        return root.main(words, PROGRAM, standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        print(error.format_message(), file=sys.stderr)
        return error.exit_code
    except click.UsageError as error:
        return _refuse(error, words)
    except click.Abort:
        return INTERRUPTED


def _refuse(error: click.UsageError, words: list[str]) -> int:
    path = PROGRAM if error.ctx is None else error.ctx.command_path
    near: list[str] = getattr(error, "possibilities", None) or []  # the nearest first
    message, fix = error.message if near else error.format_message(), f"See {path} --help."
    if near:
        fix = f"Did you mean {near[0]}?"
    if isinstance(error, click.NoSuchOption):
        message = f"No such option {error.option_name!r}."  # click's words differ by its version
        if takes := _commands_with(error.option_name, error.ctx):
            command = next((word for word in words if word in takes), takes[0])
            fix = f"Options follow the command: {path} {command} {error.option_name}"
    return fail(path.removeprefix(PROGRAM).strip(), f"{message} {fix}")


def _commands_with(option: str, context: click.Context | None) -> list[str]:
    """The commands of the group of ``context`` that take ``option``, generate first; else none."""
    if context is None or not isinstance(context.command, click.Group):
        return []
    found = [
        name
        for name, one in context.command.commands.items()
        if any(option in param.opts for param in one.params)
    ]
    return sorted(found, key=lambda name: name != "generate")
