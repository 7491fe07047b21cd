"""Checks a checkpoint's config.json against its files before anything is built from it.

A model's class builds whatever its config asks for: layers by the million, weights beyond any memory. The
headers of the files bound the sizes, whatever the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from transformers import CONFIG_MAPPING

from torch_dflash.checks import is_count
from torch_dflash.storage.weight_files import Stored

_LAYERS = ("num_hidden_layers", "decoder_layers")  # each stores at least one tensor
_ROWS = ("hidden_size", "vocab_size")  # lengths that some tensor has
_WIDTHS: tuple[str, ...] = ("intermediate_size", "head_dim", "num_attention_heads", "num_key_value_heads")
_EXPERTS: tuple[str, ...] = ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size")
# Unused fields keep a class's defaults, which are no larger than these and say nothing about the files.
_ALWAYS_FITS: dict[Any, int] = {**dict.fromkeys(_WIDTHS, 2**20), **dict.fromkeys(_EXPERTS, 2**14)}
_MAY_BE_ZERO = ("intermediate_size", *_EXPERTS)  # of classes that have none


def check_sizes(config: Mapping[str, Any], stored: Mapping[str, Stored], where: Any) -> None:
    """Refuse sizes in a config that no model of these files can have.

    Args:
        config: config.json; its ``text_config`` counts if it has one.
        stored: every tensor of the files by name.
        where: the checkpoint, for the message.

    Raises:
        ValueError: a size is no positive integer, or larger than the files; names field and value.
    """
    text = config.get("text_config")
    scope: Mapping[str, Any] = text if isinstance(text, dict) else config
    lengths = {length for part in stored.values() for length in part.shape}
    elements = sum(part.nbytes // part.dtype.itemsize for part in stored.values())
    files = ", ".join(sorted({part.file.name for part in stored.values()})[:3])
    for field in (*_LAYERS, *_ROWS, *_WIDTHS, *_EXPERTS):
        name = _own_name(scope, field)
        if name not in scope or scope[name] is None or (field not in _ROWS and type(scope[name]) is list):
            continue  # the class's default, or one for each layer
        value: Any = scope[name]
        shown = f"{name}={value!r} in {where}/config.json"
        least = 0 if field in _MAY_BE_ZERO else 1
        if not is_count(value) or value < least:
            raise ValueError(f"{shown}: must be an integer of at least {least}.")
        wrong = "config and weights are of different models; fetch both again."
        if field in _LAYERS and value > len(stored):
            raise ValueError(f"{shown}, but {files} holds {len(stored)} tensors, fewer than layers; {wrong}")
        if field in _ROWS and value not in lengths:
            raise ValueError(f"{shown}, but no tensor of {files} has a dimension of that length; {wrong}")
        if field in _ALWAYS_FITS and value > max(elements, _ALWAYS_FITS[field]):
            raise ValueError(f"{shown}, but all of {files} holds {elements} numbers; {wrong}")


def _own_name(config: Mapping[str, Any], field: str) -> str:
    """The name of ``field`` in the config's class: GPT-2 writes ``hidden_size`` as ``n_embd``."""
    kind = config.get("model_type")
    known = CONFIG_MAPPING[kind].attribute_map if isinstance(kind, str) and kind in CONFIG_MAPPING else {}
    return field if field in config else known.get(field, field)
