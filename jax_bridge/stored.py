"""One tensor of a safetensors file, known by its header and read when it is asked for."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from pathlib import Path

import torch
from safetensors import safe_open


@dataclass(frozen=True)
class Stored:
    """One tensor in a file."""

    file: Path
    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return prod(self.shape) * self.dtype.itemsize

    def read(self) -> torch.Tensor:
        """A view of the mapped file; the mapping, and the memory its pages take, goes with the tensor."""
        with safe_open(self.file, "pt") as opened:
            return opened.get_tensor(self.name)
