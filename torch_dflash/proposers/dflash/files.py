"""A drafter's checkpoint, checked before the network is built: what it holds is known from its config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from transformers import PreTrainedConfig

from torch_dflash.proposers.dflash.check_config import check_sizes, check_types
from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.pieces import Piece, in_zlabs_names
from torch_dflash.storage.weight_files import HUB_OPTIONS, find_files, read_headers

# Weights from elsewhere than the plain files.
_OTHER_SOURCES = ("state_dict", "gguf_file", "variant", "adapter_kwargs")


def check_files(
    source: str | os.PathLike[str], given: dict[str, Any], config_class: type[DFlashConfig] = DFlashConfig
) -> dict[str, Piece] | None:
    """Refuse a checkpoint whose config does not fit its files, before anything is allocated.

    Args:
        source: a directory or a hub id.
        given: what ``from_pretrained`` was called with besides.
        config_class: of the kind of drafter.

    Returns:
        Its tensors under z-lab's names; None where the weights come from elsewhere.

    Raises:
        OSError: no such checkpoint. ValueError: names the field or tensor, the value and the file.
    """
    _require_safetensors(source, given)
    if any(given.get(name) is not None for name in _OTHER_SOURCES):
        return None
    hub = {name: given[name] for name in HUB_OPTIONS if name in given}
    config = given.get("config")
    described = isinstance(config, DFlashConfig)
    raw = {} if described else config_class.get_config_dict(config or source, **hub)[0]
    check_types(raw, source)
    layout = layout_of(PreTrainedConfig.get_config_dict(source, **hub)[0])
    fields = config.to_dict() if described else raw
    stored = in_zlabs_names(layout, read_headers(find_files(source, **hub)), fields, source)
    check_sizes({name: raw[name] for name in raw if name != "vocab_size"}, stored, source)  # no embedding
    if not described:
        given = {name: value for name, value in given.items() if name != "config"}
        config = config_class.from_pretrained(config or source, **given)
    config.check()
    _check_lengths(config, stored, source)
    return stored


def _check_lengths(config: Any, stored: dict[str, Piece], source: Any) -> None:
    """Compare the fields that shape the network with the first layer and the final norm."""
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if config.num_hidden_layers > len(layers):
        raise ValueError(
            f"num_hidden_layers={config.num_hidden_layers} in {source}: its weights have {len(layers)} "
            "layers; config and weights are of different drafters."
        )
    layer, width = "layers.0.", config.head_dim
    lengths = {
        "hidden_size": ("norm.weight", config.hidden_size),
        "intermediate_size": (layer + "mlp.gate_proj.weight", config.intermediate_size),
        "head_dim": (layer + "self_attn.q_norm.weight", width),
        "num_attention_heads": (layer + "self_attn.q_proj.weight", config.num_attention_heads * width),
        "num_key_value_heads": (layer + "self_attn.k_proj.weight", config.num_key_value_heads * width),
    }
    for field, (name, length) in lengths.items():
        if name not in stored:
            raise ValueError(
                f"missing_keys={[name]} in {source}: the weights are not those of a DFlash drafter; check "
                "the file."
            )
        if stored[name].shape[:1] != (length,):
            raise ValueError(
                f"{field}={getattr(config, field)} in {source}: {name} would have {length} rows, in "
                f"{stored[name].file.name} its shape is {stored[name].shape}; config and weights are of "
                "different drafters."
            )


def _require_safetensors(source: Any, given: dict[str, Any]) -> None:
    if given.setdefault("use_safetensors", True) is not True:
        raise ValueError(
            f"use_safetensors={given['use_safetensors']!r}: weights are read from safetensors only."
        )
    folder = Path(source, given.get("subfolder", ""))
    if folder.is_dir() and not any(folder.glob("*.safetensors")):
        others = sorted(path.name for path in folder.glob("*.bin"))
        raise ValueError(
            f"{folder} holds no *.safetensors{f' but {others[0]}' if others else ''}: weights are read from "
            "safetensors only; save them with save_pretrained or safetensors.torch.save_file."
        )
