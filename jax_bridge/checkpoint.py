"""The safetensors files of a checkpoint: found, their headers checked against a model, read one by one."""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, cached_file
from transformers.utils.hub import get_checkpoint_shard_files

from jax_bridge.stacked import Stacked, find_experts
from jax_bridge.stored import Stored
from torch_dflash.checks import names_a_folder

_DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
_DTYPES |= {"I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8}
_DTYPES |= {"U8": torch.uint8, "BOOL": torch.bool}
# Once buffers of old checkpoints, now made from the config.
_COMPUTED = r"rotary_emb\.inv_freq$|(^|\.)position_ids$"
_ELSEWHERE = (
    "If transformers converts this checkpoint while loading (quantised weights, other names), "
    "load it with AutoModelForCausalLM.from_pretrained and pass that model."
)


def find_source(path_or_id: str | os.PathLike[str]) -> str:
    """The directory, or the hub id; a path that is not there never becomes a request to the hub.

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


def find_files(path_or_id: str) -> list[Path]:
    """The checkpoint's safetensors files; those of a hub id are fetched if they are not there.

    Raises:
        FileNotFoundError: no safetensors, or a shard that the index names is absent.
        ValueError: the index is damaged.
    """
    single = cached_file(path_or_id, SAFE_WEIGHTS_NAME, _raise_exceptions_for_missing_entries=False)
    if single is not None:
        return [Path(single)]
    index = cached_file(path_or_id, SAFE_WEIGHTS_INDEX_NAME, _raise_exceptions_for_missing_entries=False)
    if index is None:
        raise FileNotFoundError(
            f"{path_or_id} holds neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME}; load "
            "it with AutoModelForCausalLM and save_pretrained() it: no other kind is read."
        )
    _check_index(Path(index))
    files = [Path(file) for file in get_checkpoint_shard_files(path_or_id, index)[0]]
    for file in files:
        if not file.is_file():
            raise FileNotFoundError(f"{index} names {file.name}, which is not there; fetch it again.")
    return files


def _check_index(file: Path) -> None:
    """Raise ``ValueError`` unless ``file`` is what transformers reads as an index."""
    fix = "fetch it again, or save_pretrained() the model anew."
    try:
        index = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:  # no JSON, or not even text
        raise ValueError(f"{file} is damaged ({error}); {fix}") from error
    names = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(names, dict) or not all(isinstance(name, str) for name in names.values()) or not names:
        raise ValueError(f"{file} has no weight_map of tensors to their files; {fix}")
    if not isinstance(index.get("metadata"), dict):
        raise ValueError(f'{file} has no metadata, which transformers asks for; add "metadata": {{}} to it.')


def read_headers(files: list[Path]) -> dict[str, Stored]:
    """Every tensor of the files by name; reads no data.

    Raises:
        ValueError: a damaged file, or a type that no plain weight has.
    """
    found = {}
    for file in files:
        try:
            with safe_open(file, "pt") as opened:
                for name in opened.keys():
                    part = opened.get_slice(name)
                    dtype = _DTYPES.get(part.get_dtype())
                    if dtype is None:
                        raise ValueError(f"{file}: {name} is stored as {part.get_dtype()}. {_ELSEWHERE}")
                    found[name] = Stored(file, name, tuple(part.get_shape()), dtype)
        except SafetensorError as error:
            raise ValueError(f"{file} is damaged ({error}); fetch it again.") from error
    return found


def match(model: PreTrainedModel, stored: dict[str, Stored], where: str) -> dict[str, list[Stored | Stacked]]:
    """What of the files fills each parameter and persistent buffer of ``model``.

    It is one tensor, or a tied weight's several, of which the values must be equal, or a layer's experts.

    Raises:
        ValueError: a tensor is missing, unexpected or of another shape; names it, its file and the shapes.
    """
    saved: dict[str, Any] = model.state_dict(keep_vars=True)
    names = defaultdict(list)
    for name, tensor in saved.items():
        names[id(tensor)].append(name)
    used = set(saved)
    filled: dict[str, list[Stored | Stacked]] = {}
    for group in names.values():
        wanted = tuple(saved[group[0]].shape)
        filled[group[0]] = [stored[name] for name in group if name in stored]
        if not filled[group[0]] and (experts := find_experts(group[0], wanted, stored)):
            filled[group[0]] = [experts]
            used |= {part.name for expert in experts.experts for part in expert}
        if not filled[group[0]]:
            raise ValueError(
                f"{where}: {group[0]} {wanted} is missing from its safetensors files. {_ELSEWHERE}"
            )
        for part in filled[group[0]]:
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
                f"{_ELSEWHERE}"
            )
    return filled
