"""Weights that a checkpoint stores quantised, dequantised tensor by tensor as transformers dequantises them.

Sources: transformers 5.24, ``integrations/mxfp4.py``, ``integrations/finegrained_fp8.py`` and
``integrations/compressed_tensors.py``; compressed-tensors, ``quantization/lifecycle/forward.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import dequantize_convertops

from torch_dflash.storage.weight_files import NARROW, Stored

_PAIR = 2  # MXFP4 stores two values a byte
_BYTES = (*NARROW, torch.int8)
_STORED = {"mxfp4": (torch.uint8,), "fp8": _BYTES, "compressed-tensors": _BYTES}
_CODES = {"mxfp4": ("_blocks", ("_scales",)), "fp8": ("", ("_scale_inv", "_scale"))}
_CODES |= {"compressed-tensors": ("", ("_scale",))}
"""Of each method what the names of a weight's values and of its scales end in."""
_FORMATS = ("float-quantized", "int-quantized", "naive-quantized")
_UNREAD = re.compile(r"\.(input|output|activation|k|v|q)_scale$")
"""Scales of activations and caches: weights alone are read."""
_INSTEAD = (
    "load it with AutoModelForCausalLM.from_pretrained if transformers dequantises it, or use plain weights."
)


@dataclass(frozen=True)
class Dequantised:
    """A weight of which the file has codes and, for each block of them, a scale.

    Attributes:
        name, shape: the weight's. dtype: floating, which the values are read in.
        codes, scales: what the file has. values: (codes, scales, dtype) -> values of the same block of both.
        block: rows and columns of codes that a scale is for, in the weight's last two dimensions.
        turned: whether the file has the last two dimensions the other way round, as MXFP4's has.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    codes: Stored
    scales: Stored
    values: Callable[[Tensor, Tensor, torch.dtype], Tensor]
    block: tuple[int, int]
    turned: bool = False

    @property
    def file(self) -> Path:
        """That of the codes."""
        return self.codes.file

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.codes.nbytes + self.scales.nbytes

    def read(self) -> Tensor:
        """The values."""
        return self.values(self.codes.read(), self.scales.read(), self.dtype)

    def read_part(self, index: tuple[slice, ...]) -> Tensor:
        """A part of the values; of the files the blocks that it touches are read."""
        full = [part.indices(size)[:2] for part, size in zip(index, self.shape, strict=False)]
        full += [(0, size) for size in self.shape[len(full) :]]
        *leading, rows, columns = full
        wide = [_blocks(*part, step) for part, step in zip((rows, columns), self.block, strict=True)]
        spans = [slice(*part) for part in leading]
        inside = [slice(part[0] * step, part[1] * step) for part, step in zip(wide, self.block, strict=True)]
        blocks = [slice(*part) for part in wide]
        if self.turned:  # [.., out, in / block, pairs of a block], and the weight is [.., in, out]
            codes = scales = [*spans, inside[1], blocks[0]]
        else:
            codes, scales = [*spans, *inside], [*spans, *blocks]
        whole = prod(self.scales.shape) == 1
        found = self.values(
            self.codes.read_part(tuple(codes)),
            self.scales.read() if whole else self.scales.read_part(tuple(scales)),
            self.dtype,
        )
        starts = [part.start for part in inside]
        cut = [
            slice(part[0] - start, part[1] - start)
            for part, start in zip((rows, columns), starts, strict=True)
        ]
        return found[(..., *cut)]


def _blocks(start: int, stop: int, step: int) -> tuple[int, int]:
    """The first and last block, exclusively, that a range touches."""
    return start // step, -(-stop // step)


def method_of(config: Mapping[str, Any], where: str) -> str | None:
    """How a config.json says that its weights are quantised; None: they are plain.

    Raises:
        ValueError: by a method that is not read; names it, and the field.
    """
    text = config.get("text_config")
    given = config.get("quantization_config")
    if given is None and isinstance(text, dict):  # a wrapper's, of its language model alone
        given = text.get("quantization_config")
    if given is None:
        return None
    if not isinstance(given, dict):
        raise ValueError(
            f"{where}: quantization_config={given!r} must be an object; fetch config.json again."
        )
    method = given.get("quant_method")
    if method not in _CODES:
        raise ValueError(
            f"{where}: quantization_config says quant_method={method!r}; {', '.join(_CODES)} and plain "
            f"weights are read. Else {_INSTEAD}"
        )
    if method == "compressed-tensors":
        _check_compressed(given, where)
    return method


def _check_compressed(given: Mapping[str, Any], where: str) -> None:
    groups = given.get("config_groups") or {}
    for group in groups.values() if isinstance(groups, dict) else ():
        weights = group.get("weights") or {}
        said = {
            "format": group.get("format") or given.get("format"),
            "num_bits": weights.get("num_bits"),
            "symmetric": weights.get("symmetric", True),
        }
        for name, known in (("format", _FORMATS), ("num_bits", (8,)), ("symmetric", (True,))):
            if said[name] not in known:
                raise ValueError(
                    f"{where}: {name}={said[name]!r} of compressed-tensors in quantization_config; "
                    f"{', '.join(map(str, known))} is read. Else {_INSTEAD}"
                )
    for name in ("sparsity_config", "transform_config"):
        if given.get(name) and given[name].get("format") != "dense":
            raise ValueError(f"{where}: {name} of compressed-tensors is not read; {_INSTEAD}")


def dequantised(
    stored: dict[str, Stored], method: str | None, dtype: torch.dtype
) -> dict[str, Stored | Dequantised]:
    """``stored`` with each pair of codes and scales as one weight, read in ``dtype``.

    Raises:
        ValueError: codes have no scales, scales no codes, or the shapes of the two do not fit.
    """
    found: dict[str, Stored | Dequantised] = dict(stored)
    end, ends = _CODES.get(str(method), ("", ()))
    for name, scales in stored.items():
        last = next((one for one in ends if name.endswith(one)), None)
        base = None if last is None else name.removesuffix(last)
        if base is None or (codes := stored.get(base + end)) is None:
            continue
        del found[codes.name], found[name]
        found[base] = _pair(base, codes, scales, str(method), dtype)
    if method is not None:
        found = {name: part for name, part in found.items() if not _UNREAD.search(name)}
    for name, part in found.items():
        if part.dtype.is_floating_point and part.dtype.itemsize < 2:
            raise ValueError(
                f"{part.file}: {name} is stored as {part.dtype} without a scale beside it, and "
                f"quant_method={method!r}; fetch the checkpoint again."
            )
    return found


def _pair(name: str, codes: Stored, scales: Stored, method: str, dtype: torch.dtype) -> Dequantised:
    if codes.dtype not in _STORED[method]:
        raise ValueError(f"{codes.file}: {codes.name} is stored as {codes.dtype}, but has scales beside it.")
    if method == "mxfp4":
        *leading, out, blocks, packed = codes.shape
        shape = (*leading, blocks * packed * _PAIR, out)
        if scales.shape != codes.shape[:-1]:
            raise _unfit(codes, scales)
        return Dequantised(name, shape, dtype, codes, scales, _mxfp4, (packed * _PAIR, 1), turned=True)
    packed = method == "fp8" and codes.dtype == torch.int8  # two FP4 values a byte
    shape = (*codes.shape[:-1], codes.shape[-1] * (_PAIR if packed else 1))
    single = prod(scales.shape) == 1
    grid = (1, 1) if single else scales.shape[-2:]
    if (
        packed
        or not (single or len(scales.shape) == len(shape))
        or len(shape) < 2
        or shape[-2] % grid[0]
        or shape[-1] % grid[1]
    ):
        raise _unfit(codes, scales)
    block = shape[-2] // grid[0], shape[-1] // grid[1]
    alone = method == "compressed-tensors" and ".experts." not in name
    return Dequantised(name, shape, dtype, codes, scales, _rounded if alone else _scaled, block)


def _unfit(codes: Stored, scales: Stored) -> ValueError:
    return ValueError(
        f"{codes.file}: {codes.name} {codes.dtype} {codes.shape} and {scales.name} {scales.shape} do not "
        f"fit: every scale must be for a block of the same size; {_INSTEAD}"
    )


def _mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return dequantize_convertops(codes.contiguous(), scales.contiguous(), dtype).detach()


def _scaled(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return Fp8Dequantize(None)._dequantize_one(codes.to(torch.float32), scales, output_dtype=dtype)


def _rounded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """compressed-tensors multiplies in the scales' type."""
    return _scaled(codes, scales, scales.dtype).to(dtype)
