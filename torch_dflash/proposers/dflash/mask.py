"""``mask_embedding.pt``: a mask embedding that lies beside the weights."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers.utils import cached_file

MASK_FILE = "mask_embedding.pt"
"""A vector [H], or a dict with it as ``embedding``."""
MASK = "mask_embedding"


def read_mask(source: Any, hub: dict[str, Any], config: Any) -> Tensor | None:
    """The vector [H] of a checkpoint; None if it has no such file. Read as tensors alone: no code of it runs.

    Raises:
        ValueError: it holds none for this ``config``.
    """
    absent_is_none: dict[str, Any] = {"_raise_exceptions_for_missing_entries": False} | hub
    file = cached_file(source, MASK_FILE, **absent_is_none)
    if file is None:
        return None
    try:
        found = torch.load(io.BytesIO(Path(file).read_bytes()), weights_only=True, map_location="cpu")
    except Exception as error:  # a pickle of anything else
        raise ValueError(
            f"{MASK_FILE} in {source} holds no plain tensor ({error}); fetch it again."
        ) from error
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
