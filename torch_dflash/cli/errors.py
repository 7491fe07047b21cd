"""Errors of the user and the system: one line on stderr, exit status 2, no traceback."""

from __future__ import annotations

import errno
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")
USAGE = 2  # click's, too
STORAGE_ERRORS = errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.ENAMETOOLONG
"""Errors of a disk or a quota that a file or stdout meets, no fault of the program."""
INTERRUPTED = 130  # the exit status of Ctrl-C


class UserError(Exception):
    """A message for the user that names the field, the value and the fix."""


def one_line(error: BaseException | str) -> str:
    """The message on one line."""
    return " ".join(str(error).split()) or type(error).__name__


@contextmanager
def refusing(*kinds: type[Exception], before: str = "") -> Iterator[None]:
    """Turns errors of these ``kinds`` into a `UserError`: their message on one line, behind ``before``."""
    try:
        yield
    except kinds as error:
        raise UserError(before + one_line(error)) from None


def fail(command: str, error: BaseException | str) -> int:
    """Print ``error`` as one line of ``command`` and return the exit status of wrong usage."""
    print(f"{' '.join(['torch-dflash', *command.split()])}: {one_line(error)}", file=sys.stderr)
    return USAGE


def status_of(command: str, run: Callable[[], T]) -> T | int:
    """The result of ``run``; errors of the user and the system become one line and an exit status."""
    try:
        return run()
    except UserError as error:
        return fail(command, error)
    except BrokenPipeError:
        return hang_up()
    except OSError as error:
        if error.errno not in STORAGE_ERRORS:
            raise
        return unwritten(command, error)
    except KeyboardInterrupt:
        return INTERRUPTED


def unwritten(command: str, error: OSError | RuntimeError) -> int:
    """As `fail`, for an error of writing, which may be that of stdout itself."""
    status = fail(command, error)
    try:
        sys.stdout.flush()
    except OSError:
        hang_up()
    return status


def hang_up() -> int:
    """Exit status for a reader of stdout that has left; redirects stdout, so that no flush fails again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1
