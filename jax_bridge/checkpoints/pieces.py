"""Weights that transformers cuts out of one stored tensor, as a tower's q_proj out of its wqkv."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import WeightConverter, WeightRenaming, rename_source_key

from torch_dflash.storage.weight_files import Stored


@dataclass(frozen=True)
class Piece(Stored):
    """A weight that ``cut`` makes of a stored tensor, which is read whole for each of its pieces."""

    whole: Stored
    cut: Callable[[Tensor], Tensor]

    def read(self) -> Tensor:
        """The weight."""
        return self.cut(self.whole.read())

    def read_part(self, index: tuple[slice, ...]) -> Tensor:
        """A part of the weight."""
        return self.read()[index]


def pieces_of(whole: Stored, model: PreTrainedModel, saved: Any, mapping: list[Any]) -> list[Piece]:
    """The weights that transformers' ``mapping`` for ``model`` cuts ``whole`` into; empty: it does not.

    ``saved``: the model's weights by name.
    """
    like = torch.empty(whole.shape, dtype=whole.dtype, device="meta")
    renames = [one for one in mapping if isinstance(one, WeightRenaming)]
    for one in mapping:
        if not isinstance(one, WeightConverter) or len(one.source_patterns) > 1:
            continue
        name, used = rename_source_key(whole.name, renames, [one], model.base_model_prefix, saved)
        if used is None or name not in saved:
            continue
        found = []
        for own in one.target_patterns:
            cut = partial(_cut, one, own, model.config)
            try:
                shape = tuple(cut(like).shape)
            except RuntimeError:  # the config's heads do not divide its rows
                return []
            own_name = name.replace(one.target_patterns[0], own)
            found.append(Piece(whole.file, own_name, shape, whole.dtype, whole, cut))
        return found
    return []


def _cut(converter: Any, name: str, config: Any, whole: Tensor) -> Tensor:
    """The part ``name`` of a tensor."""
    sources, targets = converter.source_patterns, converter.target_patterns
    found: Any = {sources[0]: [whole]}
    for operation in converter.operations:
        found = operation.convert(found, source_patterns=sources, target_patterns=targets, config=config)
    return found[name]
