"""Weights that transformers cuts out of one stored tensor, as a tower's q_proj out of its wqkv."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, rename_source_key

from torch_dflash.storage.weight_files import Stored


@dataclass(frozen=True)
class Piece:
    """A weight that ``cut`` makes of the tensor ``whole``, which is read for each of its pieces."""

    name: str
    shape: tuple[int, ...]
    whole: Stored
    cut: Callable[[Tensor], Tensor]

    @property
    def file(self) -> Path:
        """The tensor's file."""
        return self.whole.file

    @property
    def dtype(self) -> torch.dtype:
        """The stored type."""
        return self.whole.dtype

    @property
    def nbytes(self) -> int:
        """Bytes of the piece."""
        return torch.empty(self.shape, dtype=self.dtype, device="meta").nbytes

    def read(self) -> Tensor:
        """The weight."""
        return self.cut(self.whole.read())

    def read_part(self, index: tuple[slice, ...]) -> Tensor:
        """A part of the weight."""
        return self.read()[index]


def cut_up(model: PreTrainedModel, renames: list[Any], converters: list[Any], whole: Stored) -> list[Piece]:
    """The weights of ``model`` that a converter of transformers makes of ``whole``; empty: there is none."""
    saved, name = model.state_dict(keep_vars=True), whole.name
    for one in converters:
        if len(one.source_patterns) > 1 or len(one.target_patterns) < 2:
            continue
        first = rename_source_key(name, renames, [one], model.base_model_prefix, saved)
        if first[1] is None or first[0] not in saved:
            continue
        like = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
        names = {own: first[0].replace(one.target_patterns[0], own) for own in one.target_patterns}
        cuts = {own: partial(_cut, one, model.config, own) for own in names}
        try:
            return [Piece(names[own], tuple(cut(like).shape), whole, cut) for own, cut in cuts.items()]
        except RuntimeError:  # the config's heads do not divide its rows
            break
    return []


def _cut(converter: WeightConverter, config: Any, name: str, whole: Tensor) -> Tensor:
    """The part ``name`` of a tensor."""
    found: Any = {converter.source_patterns[0]: [whole]}
    patterns = {"source_patterns": converter.source_patterns, "target_patterns": converter.target_patterns}
    for operation in converter.operations:
        found = operation.convert(found, **patterns, config=config)
    return found[name]
