"""Checks a drafter's checkpoint against its config before the network is built."""

from __future__ import annotations

import copy
import io
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, cached_file

from torch_dflash.checks import check_there
from torch_dflash.proposers.checkpoint.config import DrafterConfig
from torch_dflash.proposers.checkpoint.fields import check_layout
from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.layout import Fields, Layout
from torch_dflash.proposers.layouts.pieces import OWN, TensorSlice, in_zlabs_names, turns_neighbours
from torch_dflash.proposers.pair import TargetFacts, check_pair
from torch_dflash.storage.weight_files import HUB_OPTIONS, Stored, beside, read_checkpoint, read_headers

# Weights from elsewhere than the plain files.
_OTHER_SOURCES = ("state_dict", "gguf_file", "variant", "adapter_kwargs")
_DTYPES = ("dtype", "torch_dtype")
_MAPS = ("d2t", "t2d")  # compared when they are read


@dataclass(frozen=True)
class Files:
    """A checkpoint that fits its config; only the tensors' headers and the mask file are read.

    Attributes:
        layout: of the files. config: the drafter's, with the parts that the files hold.
        pieces: the tensors under z-lab's names. mask: the mask embedding [H] of its own file.
        left: arguments of ``from_pretrained`` that the config does not take.
    """

    layout: Layout
    config: Any
    pieces: dict[str, TensorSlice]
    mask: Tensor | None
    left: dict[str, Any]


def read_config(source: str | os.PathLike[str], given: dict[str, Any]) -> Fields:
    """The config.json of a directory or hub id, unchanged; ``given`` holds the options for fetching.

    Raises:
        OSError: no such file. ValueError: not a drafter's config. TypeError: no path or hub id.
    """
    if not isinstance(source, str | os.PathLike):
        raise TypeError(
            f"source={type(source).__name__}: must be the drafter's directory or hub id, the first argument: "
            "torch_dflash.load_drafter(path_or_id, target)."
        )
    check_there("source", source)
    try:
        read, _ = PreTrainedConfig.get_config_dict(source, **hub_of(given))
        check_layout(read, source)
    except (AttributeError, TypeError, RecursionError) as error:  # transformers takes a list for an object
        raise ValueError(f"config.json in {source} is no JSON object ({error}); fetch it again.") from error
    return read


def check_files(
    source: str | os.PathLike[str], given: dict[str, Any], kind: Any, target: TargetFacts | None = None
) -> Files | None:
    """Refuse a checkpoint whose config does not fit its files, before anything is allocated.

    Args:
        source: a directory or a hub id.
        given: further arguments of ``from_pretrained``; ``config`` may be the result of `read_config`.
        kind: the drafter's class. target: facts to check the drafter against.

    Returns:
        The files; None where the weights come from another source.

    Raises:
        OSError: no such checkpoint. ValueError: names the field or tensor, the value and the file.
    """
    chosen = given.get("config")
    _check_dtype(given)
    _require_safetensors(source, given)
    others = [name for name in _OTHER_SOURCES if given.get(name) is not None]
    if others and target is not None:
        raise ValueError(f"target= beside {others[0]}=: only files are compared with a target; leave it out.")
    if others:
        if isinstance(chosen, dict):
            del given["config"]
        return None
    read = chosen if isinstance(chosen, dict) else read_config(source, given)
    layout, hub = layout_of(read), hub_of(given)
    fields = _fields(read, chosen, kind.config_class, source, hub)
    stored = read_checkpoint(source, **hub)
    _check_rest(stored, source)
    pieces = in_zlabs_names(layout, stored, fields, source, turns_neighbours(read, source))
    left = {name: given[name] for name in given if name != "config"}
    if isinstance(chosen, DrafterConfig):
        config: Any = copy.deepcopy(chosen)
    else:
        kept = {name: left.pop(name) for name in (*HUB_OPTIONS, *_DTYPES) if name in left}
        config, left = kind.config_class.from_dict(dict(fields), return_unused_kwargs=True, **left)
        left |= kept
    files = Files(layout, config, pieces, read_mask(source, hub, config), left)
    _check_parts(files, kind, source)
    if target is not None:
        check_pair(target, config)
    return files


def _check_parts(files: Files, kind: Any, source: Any) -> None:
    """Note embedding, head and mask of the files in the config, then compare all tensors with it."""
    weights = {name: piece for name, piece in files.pieces.items() if name not in _MAPS}
    for name, piece in weights.items():
        if not piece.dtype.is_floating_point or piece.dtype.itemsize < 2:
            found = f"{name} in {source} is stored as {piece.dtype}, quantised or damaged"
            raise ValueError(f"{found}; load a drafter with plain weights.")
    shapes = {name: piece.shape for name, piece in weights.items()}
    if files.mask is not None:
        if MASK in shapes:
            raise ValueError(f"{MASK_FILE} lies beside {MASK} in the weights of {source}; keep one.")
        shapes[MASK] = tuple(files.mask.shape)
    for field, name in OWN.items():
        if name in shapes:
            setattr(files.config, field, True)
    files.config.check()
    check_tensors(shapes, kind, files.config, source)


def _fields(read: Fields, chosen: Any, config_class: type[DrafterConfig], source: Any, hub: Any) -> Fields:
    """The fields of the given config, of the one at a given place, or of the checkpoint's own."""
    if isinstance(chosen, DrafterConfig):
        return chosen.to_dict()
    if chosen is None or isinstance(chosen, dict):
        return config_class.in_our_fields(read, source)
    return config_class.get_config_dict(chosen, **hub)[0]


def hub_of(given: dict[str, Any]) -> dict[str, Any]:
    """The options of ``given`` for fetching files."""
    return {name: given[name] for name in HUB_OPTIONS if name in given}


def _check_rest(stored: dict[str, Stored], source: Any) -> None:
    # Further safetensors in the folder with tensors of their own would go unread.
    for file in beside(sorted({part.file for part in stored.values()})):
        unread = sorted(set(read_headers([file])) - set(stored))
        if unread:
            raise ValueError(
                f"{file.name} in {source} holds {unread[:3]}, not read, for neither model.safetensors nor "
                "an index names them; merge them in, or move the file away."
            )


def _check_dtype(given: dict[str, Any]) -> None:
    for name in _DTYPES:
        value = given.get(name)
        found = getattr(torch, value, None) if isinstance(value, str) else value
        weights = isinstance(found, torch.dtype) and found.is_floating_point
        if value not in (None, "auto") and not weights:
            raise ValueError(f"{name}={value!r}: must be a float type such as torch.bfloat16, or 'auto'.")


def _require_safetensors(source: Any, given: dict[str, Any]) -> None:
    if given.setdefault("use_safetensors", True) is not True:
        raise ValueError(f"use_safetensors={given['use_safetensors']!r}: only safetensors are read.")
    folder = Path(source, given.get("subfolder", ""))
    found = any(folder.glob("*.safetensors")) or (folder / SAFE_WEIGHTS_INDEX_NAME).is_file()
    if folder.is_dir() and not found:
        below = sorted({path.parent.name for path in folder.glob("*/*.safetensors")})
        if below:
            raise ValueError(f"{folder} holds no *.safetensors; pass subfolder={below[0]!r}.")
        others = "".join(f" but {path.name}" for path in sorted(folder.glob("*.bin"))[:1])
        raise ValueError(
            f"{folder} holds no *.safetensors{others}: only safetensors are read; save with "
            "save_pretrained or safetensors.torch.save_file."
        )


_LAYER, _SELECTOR = "layers.0.", "candidate_selector."
SHAPE_SOURCES = {
    "hidden_size": "norm.weight",
    "intermediate_size": _LAYER + "mlp.gate_proj.weight",
    "head_dim": _LAYER + "self_attn.q_norm.weight",
    "num_attention_heads": _LAYER + "self_attn.q_proj.weight",
    "num_key_value_heads": _LAYER + "self_attn.k_proj.weight",
    "target_layer_ids": "fc.weight",
    "markov_rank": "markov_head.markov_w1.weight",
    "conv_kernel_size": _LAYER + "attention_conv.base_kernel",
    "conv_group_size": _LAYER + "attention_conv.kernel_projection.weight",
    "selector_rank": _SELECTOR + "hidden_projection.weight",
    "vocab_size": _SELECTOR + "predecessor_codebook",
}
"""For each field a tensor whose shape shows the field, once the fields before are right."""


def check_tensors(found: Mapping[str, tuple[int, ...]], kind: Any, config: Any, source: Any) -> None:
    """Raise ``ValueError`` unless names and shapes are those of a ``kind`` drafter of ``config``.

    Args:
        found: shapes by the names that the network has. kind: its class. source: for the message.
    """
    layers = {name.split(".")[1] for name in found if name.startswith("layers.")}
    wrong = "config and weights are of different drafters."
    if config.num_hidden_layers > len(layers):
        count = config.num_hidden_layers
        raise ValueError(f"num_hidden_layers={count} in {source}: its weights have {len(layers)}; {wrong}")
    try:
        with torch.device("meta"):
            own = {name: tuple(one.shape) for name, one in kind(config).state_dict().items() if name != "d2t"}
    except RuntimeError as error:  # a product of sizes that no tensor has
        sizes = ", ".join(f"{name}={getattr(config, name)}" for name in list(SHAPE_SOURCES)[:4])
        raise ValueError(f"{sizes} in {source}: no tensor is so large; {wrong}") from error
    others = {name: shape for name, shape in own.items() if name in found and found[name] != shape}
    for field, name in SHAPE_SOURCES.items():
        if name in others:
            raise ValueError(
                f"{field}={getattr(config, field)} in {source}: {name} would have shape {own[name]}, in its "
                f"file it is {found[name]}; {wrong}"
            )
    for problem, names in (
        ("missing_keys", own.keys() - found.keys()),
        ("mismatched_keys", [f"{name} {found[name]}, not {shape}" for name, shape in others.items()]),
        ("unexpected_keys", {name for name in found.keys() - own.keys() if not name.endswith("inv_freq")}),
    ):
        if names:
            refuse_weights(problem, names, source, kind.kind)


def refuse_weights(problem: str, names: Iterable[Any], source: Any, kind: str) -> NoReturn:
    """Raise ``ValueError`` for weights of another config; ``problem`` is transformers' word."""
    raise ValueError(
        f"{problem}={sorted(map(str, names))[:5]} in {source}: not the weights of a {kind} drafter with this "
        "config; check both files."
    )


MASK_FILE = "mask_embedding.pt"
"""Holds a vector [H], or a dict with the vector as ``embedding``."""
MASK = "mask_embedding"


def read_mask(source: Any, hub: dict[str, Any], config: Any) -> Tensor | None:
    """The mask embedding [H] of a checkpoint; None without `MASK_FILE`. No code of the file runs.

    Raises:
        ValueError: the file holds no such vector for this ``config``.
    """
    absent_is_none: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False} | hub
    file = cached_file(source, MASK_FILE, **absent_is_none)
    if file is None:
        return None
    try:
        found = torch.load(io.BytesIO(Path(file).read_bytes()), weights_only=True, map_location="cpu")
    except Exception as error:  # a pickle of anything else
        raise ValueError(f"{MASK_FILE} in {source}: no plain tensor ({error}); fetch it again.") from error
    if isinstance(found, dict):
        mask = found.get("mask_token_id", config.mask_token_id)
        if mask != config.mask_token_id:
            raise ValueError(
                f"mask_token_id={config.mask_token_id} in {source}, but {MASK_FILE} is of {mask}; both are "
                "of different drafters."
            )
        found = found.get("embedding")
    if not isinstance(found, Tensor) or found.numel() != config.hidden_size:
        raise ValueError(f"{MASK_FILE} in {source} holds no vector of hidden_size={config.hidden_size}.")
    return found.reshape(-1)
