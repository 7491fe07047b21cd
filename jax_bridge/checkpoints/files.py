"""Finds a checkpoint by its path or id, and the tensors of its files for each weight of a model."""

from __future__ import annotations

import os
import re
import zlib
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import WeightRenaming, rename_source_key

from jax_bridge.checkpoints.experts import EXPERT, Stacked, find_experts
from jax_bridge.checkpoints.method import INSTEAD
from jax_bridge.checkpoints.pieces import pieces_of
from jax_bridge.checkpoints.quantised import Dequantised
from torch_dflash.checks import names_a_folder
from torch_dflash.storage.weight_files import CONVERTED, Stored

SAMPLE = 64
"""Values of a tensor that processes compare."""
# Once buffers of old checkpoints, now made from the config.
_COMPUTED = r"rotary_emb\.inv_freq$|(^|\.)position_ids$"


def find_source(path_or_id: str | os.PathLike[str]) -> str:
    """The directory, or the hub id; a missing path never becomes a request to the hub.

    Raises:
        TypeError: neither a string nor a path. FileNotFoundError: no such directory.
    """
    if not isinstance(path_or_id, str | os.PathLike):
        raise TypeError(f"path_or_id={path_or_id!r}: pass a checkpoint's directory or its hub id.")
    source = os.fspath(path_or_id)
    path = Path(os.path.expanduser(source))
    if source and path.is_dir():
        return str(path)
    if not isinstance(path_or_id, str) or names_a_folder(source) or path.exists():
        raise FileNotFoundError(
            f"path_or_id={source!r}: no such directory; pass a checkpoint's directory, or its hub id as a "
            "string (owner/name)."
        )
    return source


Source = Stored | Stacked | Dequantised
"""The kinds of sources of a weight."""


def renamed(
    model: PreTrainedModel, stored: dict[str, Stored | Dequantised]
) -> dict[str, Stored | Dequantised]:
    """``stored`` under the names of ``model``: transformers renames those of older layouts, and cuts some.

    Names that stay unknown are kept.
    """
    saved = model.state_dict(keep_vars=True)
    mapping = get_model_conversion_mapping(model)
    renames = [one for one in mapping if isinstance(one, WeightRenaming)]
    found: dict[str, Stored | Dequantised] = {}
    for name, part in stored.items():
        other = rename_source_key(name, renames, [], model.base_model_prefix, saved)[0]
        known = other in saved or EXPERT.search(other)
        if not known and isinstance(part, Stored) and (cut := pieces_of(part, model, saved, mapping)):
            found |= {piece.name: piece for piece in cut}
            continue
        found[other if name not in saved and known and other not in stored else name] = part
    return found


def fingerprint_of(parts: dict[str, list[Source]], kept: dict[str, torch.dtype]) -> str:
    """CRC-32 of names, types (also ``kept``), shapes, and middle values of each tensor, in hexadecimal."""
    crc = 0
    for name, group in parts.items():
        for part in group:
            middle = [slice(size // 2, size // 2 + 1) for size in part.shape[:-1]]
            some = part.read_part((*middle, *[slice(0, SAMPLE)][: len(part.shape)]))
            bits = some.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            header = f"{name} {part.dtype} {kept.get(name)} {part.shape}"
            crc = zlib.crc32(bits, zlib.crc32(header.encode(), crc))
    return f"{crc:08x}"


def match(
    model: PreTrainedModel, stored: dict[str, Stored | Dequantised], where: str
) -> dict[str, list[Source]]:
    """The sources of each parameter and persistent buffer of ``model``.

    They are one tensor, or several of a tied weight (their values must be equal), or a layer's experts.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape; names it, its file and the shapes.
    """
    saved: dict[str, Any] = model.state_dict(keep_vars=True)
    names = defaultdict(list)
    for name, tensor in saved.items():
        names[id(tensor)].append(name)
    if loose := next((part for name, part in stored.items() if name.endswith(".weight_packed")), None):
        raise _unscaled(loose)
    used = set(saved)
    filled: dict[str, list[Source]] = {}
    for group in names.values():
        wanted = tuple(saved[group[0]].shape)
        filled[group[0]] = [stored[name] for name in group if name in stored]
        if not filled[group[0]] and (experts := find_experts(group[0], wanted, stored)):
            filled[group[0]] = [experts]
            used |= experts.names
        if not filled[group[0]]:
            raise ValueError(
                f"{where}: {group[0]} {wanted} is missing from its safetensors files. {CONVERTED}"
            )
        for part in filled[group[0]]:
            if saved[group[0]].is_floating_point() and not is_plain(part.dtype):
                raise _unscaled(part)
            if part.shape != wanted:
                raise ValueError(
                    f"{part.file}: {part.name} has shape {part.shape}, by config.json it should be {wanted}; "
                    "config and weights are of different models."
                )
    ignored = re.compile("|".join([_COMPUTED, *(model._keys_to_ignore_on_load_unexpected or ())]))
    for name, part in stored.items():
        if name not in used and not ignored.search(name):
            raise ValueError(
                f"{part.file}: {name} {part.shape} is unexpected: {type(model).__name__} has no such weight. "
                f"{CONVERTED}"
            )
    return filled


def _unscaled(part: Source) -> ValueError:
    return ValueError(
        f"{part.file}: {part.name} is stored as {part.dtype} without a scale that the quantization_config of "
        f"config.json tells of; fetch both again, or {INSTEAD}"
    )


def is_plain(dtype: torch.dtype) -> bool:
    """Whether values of this type are weights, not codes."""
    return dtype.is_floating_point and dtype.itemsize > 1
