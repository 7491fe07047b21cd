"""`TensorSlice`: a checkpoint's tensors of any layout by z-lab's names, read on demand."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from torch_dflash.proposers.layouts.layout import Fields, Layout, count, switch, without
from torch_dflash.storage.weight_files import Stored

OWN = {
    "own_embedding": "embed_tokens.weight",
    "own_head": "lm_head.weight",
    "mask_embedding": "mask_embedding",
}
"""Config fields, and the tensor whose presence each states."""
_FUSED = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}


@dataclass(frozen=True)
class TensorSlice:
    """Rows of a stored tensor, ``rows`` from ``start`` on; None: all rows.

    With ``turned``, the length of a head, `read` returns them `in_halves`.
    """

    stored: Stored
    start: int = 0
    rows: int | None = None
    turned: int | None = None

    @property
    def shape(self) -> tuple[int, ...]:
        whole = self.stored.shape
        return whole if self.rows is None else (self.rows, *whole[1:])

    @property
    def dtype(self) -> torch.dtype:
        return self.stored.dtype

    @property
    def file(self) -> Path:
        return self.stored.file

    @property
    def nbytes(self) -> int:
        """Bytes in the file."""
        whole = self.stored.nbytes
        return whole if self.rows is None else whole // self.stored.shape[0] * self.rows

    def read(self) -> Tensor:
        """Its values."""
        whole = self.stored.read()
        rows = whole if self.rows is None else whole.narrow(0, self.start, self.rows).clone()
        return rows if self.turned is None else in_halves(rows, self.turned)


def in_zlabs_names(
    layout: Layout, stored: dict[str, Stored], fields: Fields, where: Any, neighbours: bool = False
) -> dict[str, TensorSlice]:
    """Every tensor that is read, by z-lab's name; a fused one as its parts.

    Args:
        layout: of the checkpoint. fields: of its config.json, in z-lab's words.
        stored: every tensor of the files. where: the checkpoint, for messages.
        neighbours: whether the rotary embedding turns neighbouring channels.

    Raises:
        ValueError: two tensors for one name, or a fused one whose shape contradicts the config.
    """
    found: dict[str, TensorSlice] = {}
    head = count(fields, "head_dim", where) if neighbours else None
    for name, tensor in stored.items():
        own = layout.zlabs(name)
        if own is None:
            continue
        for part, piece in _parts(own, tensor, fields, where).items():
            if part in found:
                raise ValueError(f"{name}, {found[part].stored.name} in {where} are both {part}: keep one.")
            found[part] = replace(piece, turned=head) if is_turned(part) else piece
    return found


def _parts(name: str, stored: Stored, fields: Fields, where: Any) -> dict[str, TensorSlice]:
    fused = next((one for one in _FUSED if f".{one}." in name), None)
    if fused is None:
        return {name: TensorSlice(stored)}
    if fused == "qkv_proj":
        names = ["num_attention_heads", "num_key_value_heads", "head_dim"]
        heads, dim = count(fields, names[0], where), count(fields, names[2], where)
        groups = heads if fields.get(names[1]) is None else count(fields, names[1], where)
        sizes = [heads * dim, groups * dim, groups * dim]
    else:
        names = ["intermediate_size"]
        sizes = [count(fields, names[0], where)] * 2
    if stored.shape[:1] != (sum(sizes),):
        raise ValueError(
            f"{stored.name} in {where} has shape {stored.shape}; by the config its rows are {sizes} "
            f"({', '.join(names)}); config and weights are of different drafters."
        )
    parts = zip(_FUSED[fused], (sum(sizes[:at]) for at in range(len(sizes))), sizes, strict=True)
    return {name.replace(fused, part): TensorSlice(stored, start, rows) for part, start, rows in parts}


MARKOV = ("markov_rank", "markov_head_type", "sample_from_anchor")
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha")
"""Fields of the confidence head, which says how much of a draft to verify; it is not read."""
CONFIDENCE_WEIGHTS = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def check_markov(head: Any, rank: Any, where: Any) -> None:
    """Raise ``ValueError`` for a Markov head that reads more than the token before."""
    if rank and head != "vanilla":
        raise ValueError(f"markov_head_type={head!r} in {where}: of DSpark's heads only 'vanilla' is known.")


# A score is a sum over channels, so queries and keys whose channels are reordered alike score the same. When
# the weights are read, the even channels of each head come first, then the odd ones.
#
# Source: vLLM and SGLang, ``is_neox_style=False`` of their rotary embedding; GPT-J.
FLAGS = ("is_neox_style", "rope_is_neox_style")
_TURNED = re.compile(r"\.self_attn\.[qk]_(proj|norm)\.")


def turns_neighbours(config: Fields, where: Any) -> bool:
    """Whether channel 2i turns with channel 2i + 1, by a config.json.

    Raises:
        ValueError: the field is neither true nor false.
    """
    rope = config.get("rope_parameters")
    places = (config, rope if isinstance(rope, dict) else {})
    return any(switch(fields, name, where, True) is False for fields in places for name in FLAGS)


def without_flags(config: Fields) -> Fields:
    """``config`` without `FLAGS`, as the weights are once read: the halves of a head turn."""
    read = without(config, FLAGS)
    rope = config.get("rope_parameters")
    if isinstance(rope, dict):
        read["rope_parameters"] = without(rope, FLAGS)
    return read


def is_turned(name: str) -> bool:
    """Whether the rows of the tensor ``name`` are channels of queries or keys."""
    return bool(_TURNED.search(name))


def in_halves(rows: Tensor, head_dim: int) -> Tensor:
    """Rows [heads * head_dim, ...] with the even channels of each head before its odd ones."""
    pairs = rows.unflatten(0, (-1, head_dim // 2, 2))
    return pairs.transpose(1, 2).flatten(0, 2).contiguous()
