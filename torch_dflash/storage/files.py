"""Writes files whole or not at all, and names a full disk."""

from __future__ import annotations

import errno
import glob
import json
import os
import re
import secrets
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from torch import Tensor


def write_whole(path: Path, write: Callable[[Path], Any]) -> None:
    """Have ``write`` fill a temporary file, then rename it to ``path``: readers see all of it or nothing.

    Raises:
        OSError: such as a full disk; also any error of ``write``. ``path`` is then untouched.
    """
    # A new file of a secret name: no other thread writes it, and no link leads away.
    part = path.with_name(f".{path.name}.{secrets.token_hex(8)}.{os.getpid()}.part")
    part.touch(exist_ok=False)
    try:
        mode = part.stat().st_mode
        write(part)
        part.chmod(mode)  # safetensors writes for the owner alone
        with part.open("rb") as file:
            os.fsync(file.fileno())
        os.replace(part, path)
    except SafetensorError as error:
        number = _number_of(error)
        if number is None:
            raise
        raise OSError(number, os.strerror(number), str(path)) from error
    finally:
        part.unlink(missing_ok=True)


class StageError(RuntimeError):
    """A stage cannot go on; the message says what is kept and gives the fix."""


class Stopped(StageError):
    """A stage stopped on request and can be resumed."""


@contextmanager
def naming_a_full_disk(path: Path) -> Iterator[None]:
    """Turn errors of a full disk, or of a too large file, while writing ``path`` into `StageError`."""
    try:
        yield
    except (OSError, SafetensorError) as error:
        number = getattr(error, "errno", None) or _number_of(error)
        if number == errno.EFBIG:
            raise StageError(
                f"{path} would be larger than a file may be here; nothing written before is lost. Raise the "
                "limit (ulimit -f) or choose another disk, and run the same command again: it goes on from "
                "here."
            ) from error
        if number not in (errno.ENOSPC, errno.EDQUOT):
            raise
        free = shutil.disk_usage(path.parent).free // 10**6
        raise StageError(
            f"the disk of {path.parent} is full ({free} MB free) while writing {path.name}; nothing written "
            "before is lost. Free some space and run the same command again: it goes on from here."
        ) from error


def write_atomically(path: Path, write: Callable[[Path], Any]) -> None:
    """`write_whole`, which also removes temporary files of killed processes.

    Raises:
        StageError: the disk is full; ``path`` is untouched.
    """
    for left in path.parent.glob(f".{glob.escape(path.name)}.*.part"):
        if not _runs(left.name.split(".")[-2]):  # killed while writing
            left.unlink(missing_ok=True)
    with naming_a_full_disk(path):
        write_whole(path, write)


def write_json(path: Path, content: Any) -> None:
    """Write ``content`` as JSON, whole or not at all."""
    write_atomically(path, lambda part: part.write_text(json.dumps(content, indent=1) + "\n"))


def _number_of(error: Exception) -> int | None:
    # safetensors writes in Rust: only its message holds the system's error number.
    found = re.search(r"os error (\d+)", str(error))
    return None if found is None else int(found[1])


def _runs(number: str) -> bool:
    """Whether a process of this number is alive."""
    try:
        os.kill(int(number), 0)
    except ProcessLookupError:
        return False
    except (PermissionError, ValueError, OverflowError):  # another user's process, or no number
        return True
    return True


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a CPU tensor as bytes."""
    flat = tensor.contiguous().view(-1)
    # Of one entry any stride is contiguous, and no other type may be read through it.
    return flat.as_strided(flat.shape, (1,)).view(torch.uint8).numpy().data


def checksum_of(tensors: dict[str, Tensor]) -> int:
    """CRC-32 over the tensors' bytes, in the order of their names."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(bytes_of(tensors[name]), value)
    return value
