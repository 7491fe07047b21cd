"""Checksums of tensors."""

from __future__ import annotations

import zlib

import torch
from torch import Tensor


def bytes_of(tensor: Tensor) -> memoryview:
    """The values of a CPU tensor as bytes."""
    return tensor.contiguous().view(-1).view(torch.uint8).numpy().data


def checksum_of(tensors: dict[str, Tensor]) -> int:
    """CRC-32 over the tensors' bytes, in the order of their names."""
    value = 0
    for name in sorted(tensors):
        value = zlib.crc32(bytes_of(tensors[name]), value)
    return value
