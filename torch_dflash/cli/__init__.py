"""The ``torch-dflash`` command."""

from __future__ import annotations

import argparse
import atexit
import gc
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from torch_dflash import __version__
from torch_dflash.cli.errors import INTERRUPTED
from torch_dflash.cli.parser import Parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; returns the process's exit status."""
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by who called: what is said goes nowhere
            setattr(sys, name, Path(os.devnull).open("w", errors="backslashreplace"))
    try:
        arguments = main_parser().parse_args(argv)
        atexit.register(gc.freeze)  # the process ends: to collect a million objects would take a second
        return arguments.run(arguments)
    except KeyboardInterrupt:
        return INTERRUPTED


def main_parser() -> argparse.ArgumentParser:
    """The whole command line."""
    parser = Parser(
        prog="torch-dflash", description="DFlash: block-diffusion speculative decoding for PyTorch."
    )
    parser.add_argument("--version", action="version", version=f"torch-dflash {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)

    from torch_dflash.cli import aot, chat, demo, doctor, fit_memory, generate, list, selftest, train

    aot.add_parser(commands)
    chat.add_parser(commands)
    demo.add_parser(commands)
    doctor.add_parser(commands)
    fit_memory.add_parser(commands)
    generate.add_parser(commands)
    list.add_parser(commands)
    selftest.add_parser(commands)
    train.add_parser(commands)
    return parser
