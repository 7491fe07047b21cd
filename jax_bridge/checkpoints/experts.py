"""Experts that a checkpoint stores one by one, as transformers 5's one stacked weight of a layer."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch

from jax_bridge.checkpoints.quantised import Dequantised
from torch_dflash.storage.weight_files import Stored

# A stacked weight's name -> the tensors of an expert for it, in the order of rows; then Mixtral's names.
_PARTS = {"gate_up_proj": (("gate_proj", "up_proj"), ("w1", "w3")), "down_proj": (("down_proj",), ("w2",))}
EXPERT = re.compile(r"\.experts\.\d+\.")
"""Matches in the names of a single expert's tensors."""


@dataclass(frozen=True)
class Stacked:
    """A weight [E, out, in] of E experts, each stored as one or more tensors of some of its rows.

    ``names`` are those of the tensors, as transformers renames them.
    """

    name: str
    shape: tuple[int, ...]
    experts: tuple[tuple[Stored | Dequantised, ...], ...]
    names: frozenset[str] = frozenset()

    @property
    def file(self) -> Path:
        """The first expert's file."""
        return self.experts[0][0].file

    @property
    def dtype(self) -> torch.dtype:
        """The stored type."""
        return self.experts[0][0].dtype

    @property
    def nbytes(self) -> int:
        """Bytes in the files."""
        return sum(part.nbytes for expert in self.experts for part in expert)

    @property
    def block(self) -> tuple[int, int] | None:
        """Rows and inputs that share a scale if all experts are codes in whole blocks; None: they are not.

        Codes are of one type, and scales, too.
        """
        (block, *_), *others = {_block_of(part) for expert in self.experts for part in expert}
        return None if others else block

    def read_codes(self, which: slice = slice(None)) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Codes [out, in] and scales of each `block`, of each expert or of some."""
        for expert in self.experts[which]:
            parts = (part.read_codes() for part in expert if isinstance(part, Dequantised))
            codes, scales = map(torch.cat, zip(*parts, strict=True))
            yield codes, scales

    def read(self) -> torch.Tensor:
        """The weight, filled expert by expert."""
        return self._stacked(self.experts)

    def read_part(self, index: tuple[slice, ...]) -> torch.Tensor:
        """A part of the weight; other experts are not read."""
        first, *inside = index
        return self._stacked(self.experts[first])[:, *inside]

    def _stacked(self, experts: tuple[tuple[Stored | Dequantised, ...], ...]) -> torch.Tensor:
        whole = torch.empty((len(experts), *self.shape[1:]), dtype=self.dtype)
        for rows, expert in zip(whole, experts, strict=True):
            for piece, part in zip(rows.chunk(len(expert)), expert, strict=True):
                piece.copy_(part.read())
        return whole


def _block_of(part: Stored | Dequantised) -> tuple[tuple[int, int] | None, torch.dtype, torch.dtype]:
    """(Rows and inputs that share a scale, types of codes and scales) of whole blocks; else (None, ...)."""
    if isinstance(part, Dequantised) and len(part.scales.shape) == 2:
        if not any(side % own for side, own in zip(part.shape, part.block, strict=True)):
            return part.block, part.codes.dtype, part.scales.dtype
    return None, part.dtype, part.dtype


def find_experts(
    name: str, shape: tuple[int, ...], stored: dict[str, Stored | Dequantised]
) -> Stacked | None:
    """The weight ``name`` [E, out, in] from its experts' tensors; None if it is not stored by experts.

    Raises:
        ValueError: an expert is missing, or of another shape or type than the others.
    """
    prefix, _, last = name.rpartition(".")
    named = (one for one in _PARTS.get(last, ()) if f"{prefix}.0.{one[0]}.weight" in stored)
    parts = next(named, None)
    if len(shape) != 3 or parts is None:
        return None
    first = stored[f"{prefix}.0.{parts[0]}.weight"]
    wanted = (shape[1] // len(parts), shape[2])
    experts, used = [], []
    for expert in range(shape[0]):  # raises at the first missing one, however many the config asks for
        names = [f"{prefix}.{expert}.{part}.weight" for part in parts]
        for one in names:
            if one not in stored:
                raise ValueError(f"{first.file.parent}: {one} is missing, and {first.name} is there.")
            if (stored[one].shape, stored[one].dtype) != (wanted, first.dtype):
                raise ValueError(
                    f"{stored[one].file}: {one} is {stored[one].dtype} of shape {stored[one].shape}, of "
                    f"{name} {shape} it should be {first.dtype} of {wanted}; config and weights are of "
                    "different models."
                )
        experts.append(tuple(stored[one] for one in names))
        used += names
    return Stacked(name, shape, tuple(experts), frozenset(used))
