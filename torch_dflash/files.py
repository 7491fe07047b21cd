"""Files that are whole or absent."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors import SafetensorError


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have ``write`` fill a file beside ``path``, then rename it: a reader sees all of it or nothing.

    Raises:
        OSError: the disk is full, say. Whatever ``write`` does; what stood at ``path`` is then untouched.
    """
    # A name of its own, not to be guessed, and made here: no other thread writes it, and no link leads away.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.{os.getpid()}.part")
    part.touch(exist_ok=False)
    try:
        mode = part.stat().st_mode
        write(part)
        part.chmod(mode)  # as any other file's: safetensors writes for the owner alone
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except SafetensorError as error:  # it writes in Rust: the number is only in the message
        found = re.search(r"os error (\d+)", str(error))
        if found is None:
            raise
        raise OSError(int(found[1]), os.strerror(int(found[1])), str(path)) from error
    finally:
        part.unlink(missing_ok=True)
