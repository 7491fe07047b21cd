"""A drafter's checkpoint, checked before the network is built: what it holds is known from its config."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME

from torch_dflash.proposers.dflash.check_config import check_sizes, check_types
from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.pieces import Piece, in_zlabs_names
from torch_dflash.proposers.notes import check_and_tell
from torch_dflash.storage.weight_files import HUB_OPTIONS, Stored, beside, read_checkpoint, read_headers

# Weights from elsewhere than the plain files.
_OTHER_SOURCES = ("state_dict", "gguf_file", "variant", "adapter_kwargs")


def check_files(
    source: str | os.PathLike[str], given: dict[str, Any], config_class: type[DFlashConfig] = DFlashConfig
) -> dict[str, Piece] | None:
    """Refuse a checkpoint whose config does not fit its files, before anything is allocated.

    Args:
        source: a directory or a hub id.
        given: what ``from_pretrained`` was called with besides. ``target``, which transformers does not know,
            is taken out: the drafter is checked against it.
        config_class: of the kind of drafter.

    Returns:
        Its tensors under z-lab's names; None where the weights come from elsewhere.

    Raises:
        OSError: no such checkpoint. ValueError: names the field or tensor, the value and the file.
    """
    target = given.pop("target", None)
    _check_dtype(given)
    _require_safetensors(source, given)
    others = [name for name in _OTHER_SOURCES if given.get(name) is not None]
    if others and target is not None:
        raise ValueError(f"target= beside {others[0]}=: only files are compared with a target; leave it out.")
    if others:
        return None
    hub = {name: given[name] for name in HUB_OPTIONS if name in given}
    config = given.get("config")
    described = isinstance(config, DFlashConfig)
    raw = {} if described else config_class.get_config_dict(config or source, **hub)[0]
    check_types(raw, source)
    layout = layout_of(PreTrainedConfig.get_config_dict(source, **hub)[0])
    fields = config.to_dict() if described else raw
    files = read_checkpoint(source, **hub)
    _check_rest(files, source)
    stored = in_zlabs_names(layout, files, fields, source)
    check_sizes({name: raw[name] for name in raw if name != "vocab_size"}, stored, source)  # no embedding
    if not described:
        given = {name: value for name, value in given.items() if name != "config"}
        config = config_class.from_pretrained(config or source, **given)
    config.check()
    _check_lengths(config, stored, source)
    if target is not None:
        check_and_tell(target, config, _dtype(given, fields, stored), **hub)
    return stored


def _check_lengths(config: Any, stored: dict[str, Piece], source: Any) -> None:
    """Compare the fields that shape the network with the tensors whose shapes they give."""
    layers = {name.split(".")[1] for name in stored if name.startswith("layers.")}
    if config.num_hidden_layers > len(layers):
        raise ValueError(
            f"num_hidden_layers={config.num_hidden_layers} in {source}: its weights have {len(layers)} "
            "layers; config and weights are of different drafters."
        )
    for field, (name, shape) in _shapes(config).items():
        part = stored.get(name) or stored.get(f"{name}.weight")  # codebooks have either name
        if part is None:
            raise ValueError(
                f"missing_keys={[name]} in {source}: the weights are not those of a {_kind(config)} drafter; "
                "check the file."
            )
        if part.shape != shape:
            raise ValueError(
                f"{field}={getattr(config, field)} in {source}: {name} would have shape {shape}, in "
                f"{part.file.name} it is {part.shape}; config and weights are of different drafters."
            )


def _shapes(config: Any) -> dict[str, tuple[str, tuple[int, ...]]]:
    """For each field a tensor whose shape it gives, once those before it are right."""
    hidden, width, layer = config.hidden_size, config.head_dim, "layers.0."
    queries, keys = config.num_attention_heads * width, config.num_key_value_heads * width
    shapes: dict[str, tuple[str, tuple[int, ...]]] = {
        "hidden_size": ("norm.weight", (hidden,)),
        "intermediate_size": (layer + "mlp.gate_proj.weight", (config.intermediate_size, hidden)),
        "head_dim": (layer + "self_attn.q_norm.weight", (width,)),
        "num_attention_heads": (layer + "self_attn.q_proj.weight", (queries, hidden)),
        "num_key_value_heads": (layer + "self_attn.k_proj.weight", (keys, hidden)),
        "target_layer_ids": ("fc.weight", (hidden, len(config.target_layer_ids) * hidden)),
    }
    if config.markov_rank:
        shapes["markov_rank"] = ("markov_head.markov_w1.weight", (config.vocab_size, config.markov_rank))
    if config.second:
        taps, rank, selector = config.conv_kernel_size, config.selector_rank, "candidate_selector."
        kernels = 2 * taps * (hidden // config.conv_group_size)
        projection = layer + "attention_conv.kernel_projection.weight"
        shapes |= {
            "conv_kernel_size": (layer + "attention_conv.base_kernel", (2, taps, hidden)),
            "conv_group_size": (projection, (kernels, hidden)),
            "selector_rank": (selector + "hidden_projection.weight", (rank, hidden)),
            "vocab_size": (selector + "predecessor_codebook", (config.vocab_size, rank)),
        }
    return shapes


def _kind(config: Any) -> str:
    return "DFlash2" if config.second else "DFlash v1"


def _check_rest(stored: dict[str, Stored], source: Any) -> None:
    """Refuse safetensors beside the checkpoint's that hold tensors of their own: they would go unread."""
    for file in beside(sorted({part.file for part in stored.values()})):
        unread = sorted(set(read_headers([file])) - set(stored))
        if unread:
            raise ValueError(
                f"{file.name} in {source} holds {unread[:3]}, which neither model.safetensors nor an index "
                "names, so they are not read; merge them in, or move the file away."
            )


def _dtype(given: dict[str, Any], written: dict[str, Any], stored: dict[str, Piece]) -> torch.dtype | None:
    """The type that the weights will have, as transformers chooses it."""
    named = [fields.get(name) for fields in (given, written) for name in ("dtype", "torch_dtype")]
    own = next((part.dtype for part in stored.values() if part.dtype.is_floating_point), None)
    asked = next((one for one in named if one not in (None, "auto")), own)
    return getattr(torch, asked) if isinstance(asked, str) else asked


def _check_dtype(given: dict[str, Any]) -> None:
    for name in ("dtype", "torch_dtype"):
        asked = given.get(name)
        found = getattr(torch, asked, None) if isinstance(asked, str) else asked
        weights = isinstance(found, torch.dtype) and found.is_floating_point
        if asked not in (None, "auto") and not weights:
            raise ValueError(
                f"{name}={asked!r}: must be a type of weights, such as torch.bfloat16, its name, or 'auto'."
            )


def _require_safetensors(source: Any, given: dict[str, Any]) -> None:
    if given.setdefault("use_safetensors", True) is not True:
        raise ValueError(
            f"use_safetensors={given['use_safetensors']!r}: weights are read from safetensors only."
        )
    folder = Path(source, given.get("subfolder", ""))
    found = any(folder.glob("*.safetensors")) or (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()
    if folder.is_dir() and not found:
        below = sorted({path.parent.name for path in folder.glob("*/*.safetensors")})
        if below:
            raise ValueError(
                f"{folder} holds no *.safetensors, but {below[0]}/ does: pass subfolder={below[0]!r}."
            )
        others = sorted(path.name for path in folder.glob("*.bin"))
        raise ValueError(
            f"{folder} holds no *.safetensors{f' but {others[0]}' if others else ''}: weights are read from "
            "safetensors only; save them with save_pretrained or safetensors.torch.save_file."
        )
