"""Looking at a weight's bits in a few places, to see writes that torch does not count."""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Iterable
from math import gcd
from typing import Any

import torch
from torch import Tensor

SAMPLES = 32
"""Places of a weight that are looked at: a step of training moves nearly all, and 270 weights take 1 ms."""
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def places(tensor: Tensor) -> Tensor:
    """A view of the bits in `SAMPLES` to 2 * `SAMPLES` places, evenly spread over rows and columns.

    Of a tensor with fewer elements: all. Of an inference tensor, which torch never counts: at least one in
    every row (along the last dimension), in all columns in turn, and all of a vector.
    """
    values = torch._neg_view(tensor.detach()) if tensor.is_neg() else tensor.detach()  # as they are stored
    bits = values.view(_BITS.get(tensor.itemsize, tensor.dtype))
    if not bits.is_contiguous():  # rare; a grid
        return bits[tuple(slice(None, None, max(1, size // 6)) for size in bits.shape)]
    row = tensor.shape[-1] if tensor.ndim > 1 else 1
    if tensor.is_inference():
        step = max(1, row - 1)
    else:
        step = max(1, tensor.numel() // SAMPLES)
        while gcd(step, row) > 1:  # or every place might be in one column, of a feature that is always zero
            step -= 1
    return bits.view(-1)[::step]


def check_ordinary(tensors: dict[str, Any]) -> None:
    """Raise ``ValueError`` for a tensor of a class of its own: what it computes is not in its memory."""
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


def fingerprint_of(tensors: dict[str, Any]) -> str:
    """The bits of torch tensors in their `places`, their names and types, in short.

    Raises:
        ValueError: as `check_ordinary`.
    """
    check_ordinary(tensors)
    crc = 0
    for name, leaf in tensors.items():
        if isinstance(leaf, Tensor):
            bits = places(leaf).cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
            crc = zlib.crc32(bits, zlib.crc32(f"{name} {leaf.dtype}".encode(), crc))
    return f"{crc:08x}"


def unchanged(pairs: Iterable[tuple[Tensor, Tensor]]) -> bool:
    """Whether every view of `places` holds what its copy does, in one comparison a device and dtype."""
    groups = defaultdict(list)
    for now, then in pairs:
        groups[now.device, now.dtype].append((now if now.ndim == 1 else now.flatten(), then))
    return all(torch.equal(*map(torch.cat, zip(*group, strict=True))) for group in groups.values())
