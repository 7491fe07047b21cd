"""Samples of a weight's bits, to detect writes that bypass torch's version counter."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from math import gcd, prod
from typing import Any

import numpy as np
import torch
from torch import Tensor

SAMPLES = 32
"""Samples of a weight with few rows: a training step changes nearly all."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def samples(tensor: Tensor) -> Tensor:
    """A view of bits that are evenly spread over rows and columns.

    At least `SAMPLES`, and one in every row (along the last dimension), in all columns in turn; all of a
    vector. Of a tensor with gaps between its rows, a slice say, a few columns.
    """
    values = torch._neg_view(tensor.detach()) if tensor.is_neg() else tensor.detach()  # as they are stored
    bits = values.view(_BITS.get(tensor.itemsize, tensor.dtype))
    order = sorted(range(bits.ndim), key=bits.stride, reverse=True)
    stored, row = bits.permute(order), tensor.shape[-1] if tensor.ndim > 1 else 1
    if not stored.is_contiguous():
        return bits[..., :: max(1, row // 3)]
    inner = prod(stored.shape[order.index(bits.ndim - 1) + 1 :]) if order else 1  # of a transpose: its rows
    step = max(1, min(row - 1, tensor.numel() // SAMPLES))
    # A common factor might put all places into one column, which may always be zero, or leave rows out.
    while gcd(step, row) > 1 or gcd(step, inner) > 1:
        step -= 1
    return stored.reshape(-1)[::step]


def check_ordinary(tensors: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a tensor subclass: its memory may not hold the values it computes with."""
    for name, leaf in tensors.items():
        if isinstance(leaf, Tensor) and type(leaf) not in (Tensor, torch.nn.Parameter, torch.nn.Buffer):
            once = (
                "dequantise it once (module.weight = nn.Parameter(module.weight.dequantize()))"
                if hasattr(leaf, "dequantize")
                else "make it an ordinary tensor (model.dequantize(), where the model was loaded quantised)"
            )
            raise ValueError(
                f"{name} is a {type(leaf).__name__}, which runtime='xla' cannot read; pass runtime='eager', "
                f"or {once}."
            )


def checksum(tensors: dict[str, Any]) -> str:
    """CRC-32 of the names, types and `samples` of torch tensors, in hexadecimal.

    Raises:
        ValueError: as `check_ordinary`.
    """
    check_ordinary(tensors)
    crc = 0
    for name, leaf in tensors.items():
        if isinstance(leaf, Tensor):
            bits = on_host(samples(leaf)).tobytes()
            crc = zlib.crc32(bits, zlib.crc32(f"{name} {leaf.dtype}".encode(), crc))
    return f"{crc:08x}"


def on_host(bits: Any) -> np.ndarray:
    """Bits as a numpy array, without a copy on a CPU."""
    # `Tensor.numpy` would forbid to resize the storage.
    return np.from_dlpack(bits.cpu()) if isinstance(bits, Tensor) else bits


def unchanged(pairs: Iterable[tuple[Any, np.ndarray]]) -> bool:
    """Whether every view of `samples` equals its copy, in one comparison per dtype."""
    groups = defaultdict(lambda: ([], []))
    for now, then in pairs:
        groups[then.dtype][0].append(on_host(now).ravel())
        groups[then.dtype][1].append(then.ravel())
    return all(np.array_equal(np.concatenate(now), np.concatenate(then)) for now, then in groups.values())
