"""Whether a file is the one that is meant."""

from __future__ import annotations

import hashlib
from functools import cache
from pathlib import Path


class DemoModelError(RuntimeError):
    """The demo model could not be fetched, checked or stored; the message says what to do."""


def require_sha256(path: Path, expected: str) -> None:
    """Refuse a file with another checksum, before anything is read from it."""
    found = sha256(path)
    if found != expected:
        raise DemoModelError(
            f"{path.name} is not the file this library was written for: expected sha256 "
            f"{expected}, found {found}; nothing was read from it. Try again, and if it stays so, "
            "check which package index pip or uv uses (pip config list; uv.toml)."
        )


def sha256(path: Path) -> str:
    """The checksum of a file, which is read once a process, as long as its inode, size and times stay."""
    about = path.stat()
    return _read_sha256(path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@cache
def _read_sha256(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
