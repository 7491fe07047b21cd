"""A checkpoint of any layout as transformers' ``from_pretrained`` takes it: its files, or tensors read."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.utils import cached_file

from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.dflash.extras import has_smaller_vocabulary
from torch_dflash.proposers.dflash.files import check_files
from torch_dflash.proposers.dflash.tensors import check_tensors
from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.pieces import OWN
from torch_dflash.proposers.layouts.zlab import ZLAB
from torch_dflash.storage.weight_files import HUB_OPTIONS

MASK_FILE = "mask_embedding.pt"
"""A mask embedding beside the weights: a vector [H], or a dict with it as ``embedding``."""
MASK = "mask_embedding"
_MAPS = ("d2t", "t2d")  # `_check_ids` compares them


def in_our_names(source: Any, given: dict[str, Any], kind: Any) -> tuple[tuple[Any], dict[str, Any]]:
    """The arguments with which ``from_pretrained`` loads ``source``, checked before anything is allocated.

    A checkpoint in z-lab's layout is left to transformers. Of any other, and of one with an embedding, a head
    or a mask embedding of its own, the tensors are read here and handed over under our network's names.

    Raises:
        OSError, ValueError: as `check_files`; or the tensors contradict each other.
    """
    config_class: type[DFlashConfig] = kind.config_class
    pieces = check_files(source, given, config_class)
    if pieces is None:
        return (source,), given
    hub = {name: given[name] for name in HUB_OPTIONS if name in given}
    raw, _ = PreTrainedConfig.get_config_dict(source, **hub)
    mask = _mask_embedding(source, hub)
    own = {field: True for field, name in OWN.items() if name in pieces}
    own |= {} if mask is None else {"mask_embedding": True}
    config, left = _config(source, given, config_class)
    for name, value in own.items():
        setattr(config, name, value)
    config.check()
    shapes = {name: piece.shape for name, piece in pieces.items() if name not in _MAPS}
    check_tensors(shapes | ({} if mask is None else {MASK: (config.hidden_size,)}), kind, config, source)
    if layout_of(raw) is ZLAB and not own:
        return (source,), given
    tensors = {name: piece.read() for name, piece in pieces.items()}
    if mask is not None:
        if MASK in tensors:
            raise ValueError(f"{MASK_FILE} lies beside {MASK} in the weights of {source}; keep one.")
        tensors[MASK] = _checked(mask, config, source)
    _check_ids(tensors, config, source)
    given = left
    rest = {name: value for name, value in given.items() if name not in HUB_OPTIONS}
    return (None,), rest | {"config": config, "state_dict": tensors}


def _config(source: Any, given: dict[str, Any], config_class: type[DFlashConfig]) -> tuple[Any, Any]:
    """The config that is given, or read, and the arguments that it leaves."""
    types = {name: given[name] for name in ("dtype", "torch_dtype") if name in given}
    rest = {name: value for name, value in given.items() if name not in ("config", *types)}
    if isinstance(given.get("config"), DFlashConfig):
        return copy.deepcopy(given["config"]), rest | types
    read: Any = config_class.from_pretrained(given.get("config") or source, return_unused_kwargs=True, **rest)
    return read[0], read[1] | types


def _mask_embedding(source: Any, hub: dict[str, Any]) -> Any:
    """What ``mask_embedding.pt`` holds; read as tensors alone: no code of it runs."""
    absent_is_none: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False} | hub
    file = cached_file(source, MASK_FILE, **absent_is_none)
    if file is None:
        return None
    try:
        return torch.load(io.BytesIO(Path(file).read_bytes()), weights_only=True, map_location="cpu")
    except Exception as error:  # a pickle of anything else
        raise ValueError(
            f"{MASK_FILE} in {source} holds no plain tensor ({error}); fetch it again."
        ) from error


def _checked(found: Any, config: DFlashConfig, source: Any) -> Tensor:
    if isinstance(found, dict):
        mask = found.get("mask_token_id", config.mask_token_id)
        if mask != config.mask_token_id:
            raise ValueError(
                f"mask_token_id={config.mask_token_id} in {source}, but {MASK_FILE} is of {mask}; they are "
                "of different drafters."
            )
        found = found.get("embedding")
    if not isinstance(found, Tensor) or found.numel() != config.hidden_size:
        raise ValueError(
            f"{MASK_FILE} in {source} holds no vector of hidden_size={config.hidden_size} numbers."
        )
    return found.reshape(-1)


def _check_ids(tensors: dict[str, Tensor], config: Any, source: Any) -> None:
    """Compare ``d2t`` with the two vocabularies, and with ``t2d``, which is then dropped."""
    marked, offsets = tensors.pop("t2d", None), tensors.get("d2t")
    if offsets is not None and (offsets.is_floating_point() or offsets.is_complex()):
        raise ValueError(f"d2t in {source} is of {offsets.dtype}; ids are whole numbers: fetch it again.")
    if not has_smaller_vocabulary(config):
        tensors.pop("d2t", None)
        if offsets is not None and offsets.any():
            raise ValueError(
                f"d2t in {source} maps ids to others, but the config names no smaller draft_vocab_size."
            )
        return
    if offsets is None or offsets.shape != (config.draft_vocab_size,):
        shape = None if offsets is None else tuple(offsets.shape)
        raise ValueError(
            f"d2t in {source} should have shape ({config.draft_vocab_size},) by draft_vocab_size, it has "
            f"{shape}; without it no draft can be said in the target's ids."
        )
    ids = torch.arange(len(offsets)) + offsets
    if ids.min() < 0 or ids.max() >= config.vocab_size or len(ids.unique()) < len(ids):
        raise ValueError(
            f"d2t in {source} maps two ids to one, or beyond the target's vocab_size={config.vocab_size}: it "
            "must hold offsets, target id = draft id + d2t[draft id]."
        )
    if marked is not None and not torch.equal(marked.bool().nonzero()[:, 0], ids.sort().values):
        raise ValueError(f"t2d in {source} marks other ids than d2t maps to; one of the two is damaged.")
