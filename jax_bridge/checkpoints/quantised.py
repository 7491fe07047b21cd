"""Dequantises a checkpoint's weights tensor by tensor, as transformers does.

Sources: transformers 5.24, ``integrations/mxfp4.py``, ``integrations/finegrained_fp8.py`` and
``integrations/compressed_tensors.py``; compressed-tensors, ``quantization/lifecycle/forward.py``.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod
from pathlib import Path

import torch
from torch import Tensor
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from jax_bridge.checkpoints.method import INSTEAD, Method
from torch_dflash.storage.weight_files import NARROW, Stored, read_all

Block = tuple[int, int]

_PAIR = 2  # MXFP4 stores two values a byte
_WORD = 8  # codes of 4 bits in an integer of 32
_BYTES = (*NARROW, torch.int8)
_STORED = {"mxfp4": (torch.uint8,), "fp8": NARROW, "compressed-tensors": _BYTES}
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_SCALES = {"mxfp4": (torch.uint8,), "fp8": (*_FLOATS, torch.float8_e8m0fnu, torch.uint8)}
_SCALES |= {"compressed-tensors": _FLOATS}
"""Types of codes and of scales by method; uint8 is an exponent."""
_CODES = {"mxfp4": ("_blocks", ("_scales",)), "fp8": ("", ("_scale_inv", "_scale"))}
_CODES |= {"compressed-tensors": ("", ("_scale",))}
"""Endings of the names of a weight's values and scales, by method."""
_UNREAD = re.compile(r"\.(input|output|activation|k|v|q)_(scale|zero_point)$")
"""Scales and zero points of activations and caches: only weights are read."""


@dataclass(frozen=True)
class Packed(Stored):
    """Codes [out, in] from -8 to 7 that a file has as integers of 32 bits, the first in the lowest bits.

    The file holds a code as itself and 8.
    """

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        return super().nbytes // 2

    def read(self) -> Tensor:
        """The codes."""
        return _unpacked(super().read())

    def read_part(self, index: tuple[slice, ...]) -> Tensor:
        """A slice of both axes; only the integers that it touches are read."""
        rows, columns = index
        start, stop, _ = columns.indices(self.shape[1])
        first, last = _blocks(start, stop, _WORD)
        found = _unpacked(super().read_part((rows, slice(first, last))))
        return found[:, start - first * _WORD : stop - first * _WORD]


def _unpacked(words: Tensor) -> Tensor:
    pairs = words.contiguous().view(torch.uint8)
    return torch.stack([pairs & 15, pairs >> 4], dim=-1).flatten(-2).view(torch.int8) - 8


@dataclass(frozen=True)
class Dequantised:
    """A weight that is stored as codes and a scale for each block of them.

    Attributes:
        name, shape: the weight's. dtype: floating, of the values read.
        codes, scales: as stored. values: (codes, scales, dtype) -> values of the same block of both.
        block: codes per scale in the last two dimensions; the last block may be short.
        turned: the file has the last two dimensions swapped, as MXFP4's has.
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
        """The file of the codes."""
        return self.codes.file

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return self.codes.nbytes + self.scales.nbytes

    def read_codes(self) -> tuple[Tensor, Tensor]:
        """Codes and scales as stored."""
        return self.codes.read(), self.scales.read()

    def read_codes_of(self, rows: slice, columns: slice, unit: int = 0) -> tuple[Tensor, Tensor, Block]:
        """Codes and scales of a part of a matrix, and its block.

        ``columns`` part no block. ``unit``: ``rows`` begin and end at a multiple of it; blocks become shorter
        where need be, so that they do, too. 0: ``rows`` are all.
        """
        (start, stop, _), size = rows.indices(self.shape[0]), self.block[1]
        step = gcd(self.block[0], unit)
        first, last = _blocks(start, stop, self.block[0])
        codes = self.codes.read_part((rows, columns))
        block = step, min(size, codes.shape[1])
        if prod(self.scales.shape) == 1:
            return codes, self.scales.read(), block
        inputs = slice(*_blocks(*columns.indices(self.shape[1])[:2], size))
        scales = self.scales.read_part((slice(first, last), inputs))
        begin = (start - first * self.block[0]) // step
        scales = scales.repeat_interleave(self.block[0] // step, 0)
        return codes, scales[begin : begin + -(-(stop - start) // step)], block

    def read(self) -> Tensor:
        """The dequantised values."""
        return self._valued(self.codes.read(), self.scales.read())

    def _valued(self, codes: Tensor, scales: Tensor) -> Tensor:
        """Values of whole blocks; where the last one is short, scales are repeated by row or column."""
        for axis, step in zip((-2, -1), self.block, strict=True):
            if not self.turned and scales.numel() > 1 and codes.shape[axis] != scales.shape[axis] * step:
                scales = scales.repeat_interleave(step, axis).narrow(axis, 0, codes.shape[axis])
        return self.values(codes, scales, self.dtype)

    def read_part(self, index: tuple[slice, ...]) -> Tensor:
        """A part of the values; only the blocks that it touches are read."""
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
        theirs = self.scales.read() if whole else self.scales.read_part(tuple(scales))
        found = self._valued(self.codes.read_part(tuple(codes)), theirs)
        starts = [part.start for part in inside]
        cut = [
            slice(part[0] - start, part[1] - start)
            for part, start in zip((rows, columns), starts, strict=True)
        ]
        return found[(..., *cut)]


def _blocks(start: int, stop: int, step: int) -> tuple[int, int]:
    """The range of blocks that a range of entries touches."""
    return start // step, -(-stop // step)


def dequantised(
    stored: dict[str, Stored], method: Method | None, dtype: torch.dtype
) -> dict[str, Stored | Dequantised]:
    """``stored`` with each pair of codes and scales as one weight, read in ``dtype``.

    Raises:
        ValueError: types or shapes of codes and scales do not fit, codes have two scales, or a zero point.
    """
    found: dict[str, Stored | Dequantised] = dict(stored)
    if method is None:
        return found
    packed: dict[str, Packed] = {}
    end, ends = _CODES.get(method.name, ("", ()))
    for name, scales in stored.items():
        last = next((one for one in ends if name.endswith(one)), None)
        base = "" if last is None else name.removesuffix(last)
        codes = stored.get(base + end) or _packed(base, stored)
        if not base or codes is None:
            continue
        if isinstance(pair := found.get(base), Dequantised):
            raise ValueError(
                f"{scales.file}: {name} and {pair.scales.name} are both scales of {base}; keep one."
            )
        del found[codes.name], found[name]
        if isinstance(codes, Packed) and found.pop(f"{base}_shape", None):
            packed[f"{base}_shape"] = codes
        found[base] = _pair(base, codes, scales, method, dtype)
    for name, size in read_all(stored[name] for name in packed):
        if (said := tuple(size.tolist())) != (shape := packed[name].shape):
            raise ValueError(
                f"{packed[name].file}: {name} says {said}, and {packed[name].name} holds {shape}: rows that "
                f"do not fill whole integers of 8 codes are not read; {INSTEAD}"
            )
    for name, zeros in stored.items():
        if name.endswith("_zero_point") and isinstance(found.get(name[:-11]), Dequantised):
            if zeros.read().float().any():
                raise ValueError(f"{zeros.file}: {name} holds others than 0, which is not read; {INSTEAD}")
            del found[name]
    return {name: part for name, part in found.items() if not _UNREAD.search(name)}


def _packed(base: str, stored: dict[str, Stored]) -> Packed | None:
    """The codes of the weight ``base`` in pack-quantized; None: there are none."""
    words, order = stored.get(f"{base}_packed"), stored.get(f"{base}_g_idx")
    if words is None:
        return None
    if order is not None:
        raise ValueError(f"{order.file}: {order.name}, an order of inputs (actorder), is not read; {INSTEAD}")
    if words.dtype != torch.int32 or len(words.shape) != 2:
        raise ValueError(
            f"{words.file}: {words.name} is stored as {words.dtype} of shape {words.shape}; torch.int32 of "
            f"[out, in / 8] is read. Fetch the checkpoint again, or {INSTEAD}"
        )
    return Packed(words.file, words.name, (words.shape[0], words.shape[1] * _WORD), torch.int8)


def _pair(name: str, codes: Stored, scales: Stored, method: Method, dtype: torch.dtype) -> Dequantised:
    kind = method.name
    for part, known in ((codes, _STORED[kind]), (scales, _SCALES[kind])):
        if part.dtype not in known:
            raise ValueError(
                f"{part.file}: {part.name} is stored as {part.dtype}; of quant_method={kind!r} "
                f"{', '.join(map(str, known))} is read. Fetch the checkpoint again, or {INSTEAD}"
            )
    if kind == "mxfp4":
        *leading, out, blocks, packed = codes.shape
        shape = (*leading, blocks * packed * _PAIR, out)
        if scales.shape != codes.shape[:-1]:
            raise _unfit(codes, scales, method)
        return Dequantised(name, shape, dtype, codes, scales, _mxfp4, (packed * _PAIR, 1), turned=True)
    shape, single = codes.shape, prod(scales.shape) == 1
    block = None
    if len(shape) > 1 and (single or scales.shape[:-2] == shape[:-2]):
        block = (shape[-2], shape[-1]) if single else method.block_of(shape, scales.shape)
    if block is None:
        raise _unfit(codes, scales, method)
    alone = kind == "compressed-tensors" and (".experts." not in name or isinstance(codes, Packed))
    return Dequantised(name, shape, dtype, codes, scales, _rounded if alone else _scaled, block)


def _unfit(codes: Stored, scales: Stored, method: Method) -> ValueError:
    named = "" if method.blocks is None else f", of {method.blocks} (rows, columns; None: all) by config.json"
    return ValueError(
        f"{codes.file}: {codes.name} {codes.dtype} {codes.shape} and {scales.name} {scales.shape} do not "
        f"fit: every scale must be for a block of the same size, the last for what is left{named}; fetch "
        "config.json and weights again, or use plain weights."
    )


def _mxfp4(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return convert_moe_packed_tensors(codes.contiguous(), scales.contiguous(), dtype=dtype)


def _scaled(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    return Fp8Dequantize(None)._dequantize_one(codes.to(torch.float32), scales, output_dtype=dtype)


def _rounded(codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """compressed-tensors multiplies in the scales' type."""
    return _scaled(codes, scales, scales.dtype).to(dtype)
