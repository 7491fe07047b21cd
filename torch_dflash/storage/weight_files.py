"""Finds a checkpoint's safetensors files and reads their headers."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path, PurePosixPath, PureWindowsPath
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from torch_dflash.storage.json_text import parse_json

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}
NARROW = (torch.float8_e4m3fn, torch.float8_e5m2)
"""Types of quantised weights, which need a scale."""
_DTYPES |= {"F8_E4M3": NARROW[0], "F8_E5M2": NARROW[1], "F8_E8M0": torch.float8_e8m0fnu}
HUB_OPTIONS = ("cache_dir", "force_download", "local_files_only", "proxies", "revision", "subfolder", "token")
"""Options of ``from_pretrained`` for the place in a repository and for fetching."""
CONVERTED = (
    "If transformers converts this checkpoint while loading (quantised weights, other names), "
    "load it with AutoModelForCausalLM.from_pretrained, or AutoModelForImageTextToText's, and pass it."
)


@dataclass(frozen=True)
class Stored:
    """One tensor in a file, known by its header; read on demand."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """A view of the mapped file; the mapping and its memory live as long as the tensor."""
        with safe_open(self.file, "pt") as opened:
            return opened.get_tensor(self.name)

    def read_part(self, index: tuple[slice, ...]) -> torch.Tensor:
        """A slice of each axis; only this part of the file is read."""
        if not self.shape:
            return self.read()
        with safe_open(self.file, "pt") as opened:
            return opened.get_slice(self.name)[index]


def read_all(parts: Iterable[Stored]) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and tensors, file by file: each is opened once."""
    files: dict[Path, list[str]] = {}
    for part in parts:
        files.setdefault(part.file, []).append(part.name)
    for file, names in files.items():
        with safe_open(file, "pt") as opened:
            yield from ((name, opened.get_tensor(name)) for name in names)


def find_files(path_or_id: str | os.PathLike[str], **hub: Any) -> tuple[list[Path], Path | None]:
    """(The checkpoint's safetensors files, fetched from a hub if need be; the index of several files).

    Args:
        path_or_id: a directory or a hub id.
        hub: options of ``from_pretrained`` for place and fetching (``revision``, ``subfolder``).

    Raises:
        FileNotFoundError: no safetensors, or a missing shard of the index.
        ValueError: a damaged index, or one that names a file outside of the checkpoint.
    """
    absent_is_none: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False} | hub
    single = cached_file(path_or_id, SAFE_WEIGHTS_NAME, **absent_is_none)
    if single is not None:
        return [Path(single)], None
    index = cached_file(path_or_id, SAFE_WEIGHTS_INDEX_NAME, **absent_is_none)
    if index is None:
        raise FileNotFoundError(
            f"{path_or_id}{_place(hub)} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; "
            "load it with AutoModelForCausalLM and save_pretrained() it: no other kind is read."
        )
    named_files(Path(index))
    files = [Path(file) for file in get_checkpoint_shard_files(path_or_id, index, **hub)[0]]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index} names {file.name}, which is not there; fetch it again.")
    return files, Path(index)


def _place(hub: dict[str, Any]) -> str:
    chosen = [f"{name}={hub[name]!r}" for name in ("revision", "subfolder") if hub.get(name)]
    return f" at {', '.join(chosen)}" if chosen else ""


def read_checkpoint(path_or_id: str | os.PathLike[str], **hub: Any) -> dict[str, Stored]:
    """Every tensor of a checkpoint by name, from one file or all shards; reads no data.

    Raises:
        FileNotFoundError, ValueError: as `find_files` and `read_headers`; or no file has a tensor of the
            index.
    """
    files, index = find_files(path_or_id, **hub)
    stored = read_headers(files)
    named = {} if index is None else named_files(index)
    absent = sorted(set(named) - set(stored))
    if absent:
        raise ValueError(
            f"{index} says that {absent[0]} is in {named[absent[0]]}, but none of its files holds it (of "
            f"{len(absent)} tensors); fetch it again, or save_pretrained() the model anew."
        )
    return stored


def beside(files: list[Path]) -> list[Path]:
    """The other safetensors files in the checkpoint's folder, which are not read."""
    known = {file.name for file in files}
    return sorted(one for one in files[0].parent.glob("*.safetensors") if one.name not in known)


def named_files(file: Path) -> dict[str, str]:
    """Tensors and their files from an index; ``ValueError`` unless transformers reads it as one."""
    fix = "fetch it again, or save_pretrained() the model anew."
    try:
        index = parse_json(file.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or no text
        raise ValueError(f"{file} is damaged ({error}); {fix}") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise ValueError(f"{file} has no weight_map of tensors to their files; {fix}")
    if not isinstance(index.get("metadata"), dict):
        raise ValueError(f'{file} has no metadata, which transformers asks for; add "metadata": {{}} to it.')
    for tensor, name in names.items():
        if _leaves(name):
            raise ValueError(f"{file}: weight_map has {tensor} in {name!r}, outside of the checkpoint; {fix}")
    return names


def _leaves(name: str) -> bool:
    """Whether the text of a file's name leads out of its folder; the hub's cache holds links."""
    path, windows = PurePosixPath(name), PureWindowsPath(name)
    return bool(path.root or windows.drive or windows.root) or ".." in path.parts + windows.parts


def read_headers(files: list[Path]) -> dict[str, Stored]:
    """Every tensor of the files by name; reads no data.

    Raises:
        ValueError: a damaged file, an unknown type, or a tensor in two files.
    """
    found: dict[str, Stored] = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise ValueError(f"{file}: {name} is stored as {part.get_dtype()}. {CONVERTED}")
                    if name in found:
                        raise ValueError(
                            f"{name} lies in both {found[name].file.name} and {file}; remove one, or "
                            "save_pretrained() the model anew."
                        )
                    found[name] = Stored(file, name, tuple(part.get_shape()), dtype)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}); fetch it again.") from error
    return found
