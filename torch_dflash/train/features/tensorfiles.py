"""Tensor files with checksums, so that damaged files are refused."""

from __future__ import annotations

import json
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from torch_dflash.storage.files import StageError, bytes_of, write_atomically


def write_tensors(path: Path, tensors: dict[str, Tensor], metadata: dict[str, str]) -> None:
    """Write a safetensors file, whole or not at all, with a checksum of its content."""
    value = _begun(metadata)
    for name in sorted(tensors):
        value = _added(value, name, tensors[name])
    sealed = metadata | {"checksum": str(value)}
    write_atomically(path, lambda part: save_file(tensors, part, sealed))


@contextmanager
def reading_tensors(path: Path, remedy: str) -> Iterator[tuple[Any, dict[str, str]]]:
    """(open safetensors file, metadata) of a file of `write_tensors`, its checksum compared.

    Raises:
        StageError: a damaged file, or a name missing within the ``with`` block; the message ends with
            ``remedy``.
    """
    try:
        file = safe_open(path, framework="pt")
        metadata = dict(file.metadata() or {})
        value, checksum = _begun(metadata), metadata.pop("checksum")
        for name in sorted(file.keys()):
            value = _added(value, name, file.get_tensor(name))
        if str(value) != checksum:
            raise ValueError("its checksum differs, or another version of torch-dflash wrote it")
        yield file, metadata
    except (SafetensorError, OSError, KeyError, TypeError, ValueError) as error:
        why = f"it holds no {error}" if isinstance(error, KeyError) else error
        raise StageError(f"{path} is damaged ({why}); {remedy}") from error


def _begun(metadata: dict[str, str]) -> int:
    items = sorted(item for item in metadata.items() if item[0] != "checksum")
    return zlib.crc32(json.dumps(items).encode())


def _added(value: int, name: str, tensor: Tensor) -> int:
    value = zlib.crc32(json.dumps([name, str(tensor.dtype), list(tensor.shape)]).encode(), value)
    return zlib.crc32(bytes_of(tensor), value)


SAMPLE = 64  # values of each parameter; a fine-tune changes nearly all


@dataclass(frozen=True)
class TargetFingerprint:
    """Identifies a target by its weights, in any place and float type."""

    name: str = field(compare=False)
    hidden_size: int
    weights: str

    @classmethod
    def of(cls, target: Any) -> TargetFingerprint:
        """The fingerprint of a live target."""
        hidden = target.get_input_embeddings().weight.shape[1]
        return cls(target.config.name_or_path, hidden, weights_fingerprint(target))

    def __str__(self) -> str:
        return f"{self.name or 'a target'} (hidden size {self.hidden_size}, weights {self.weights})"


def weights_fingerprint(module: nn.Module) -> str:
    """A checksum of the shapes and of sampled values of every parameter; reads only these."""
    value = 0
    for parameter in module.parameters():
        flat = parameter.detach().flatten()
        # Rounded, so that a model loaded in bfloat16 equals the saved one.
        sample = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].cpu().to(torch.bfloat16)
        value = zlib.crc32(repr(tuple(parameter.shape)).encode(), value)
        value = zlib.crc32(bytes_of(sample), value)
    return f"{value:08x}"
