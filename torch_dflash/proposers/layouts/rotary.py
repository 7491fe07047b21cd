"""Rotary embeddings that turn neighbouring channels, read as ones that turn the two halves of a head.

A score is a sum over channels, so queries and keys whose channels are reordered alike score the same. When
the weights are read, the even channels of each head come first, then the odd ones.

Source: vLLM and SGLang, ``is_neox_style=False`` of their rotary embedding; GPT-J.
"""

from __future__ import annotations

import re
from typing import Any

from torch import Tensor

from torch_dflash.proposers.layouts.layout import Fields, switch

FLAGS = ("is_neox_style", "rope_is_neox_style")
_TURNED = re.compile(r"\.self_attn\.[qk]_(proj|norm)\.")


def turns_neighbours(config: Fields, where: Any) -> bool:
    """Whether a config.json says that channel 2i turns with channel 2i + 1.

    Raises:
        ValueError: the field is neither true nor false.
    """
    rope = config.get("rope_parameters")
    places = (config, rope if isinstance(rope, dict) else {})
    return any(switch(fields, name, where, True) is False for fields in places for name in FLAGS)


def without_flags(config: Fields) -> Fields:
    """``config`` as its weights are once they are read: the halves of a head turn."""
    read = {name: value for name, value in config.items() if name not in FLAGS}
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        read["rope_parameters"] = {name: rope[name] for name in rope if name not in FLAGS}
    return read


def is_turned(name: str) -> bool:
    """Whether the rows of the tensor ``name`` are channels of queries or keys."""
    return bool(_TURNED.search(name))


def in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] with the even channels of each head before its odd ones."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()
