"""Drafters from files: today of one kind. Another one branches here, and in `choose`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.dflash.model import DFlashDraftModel


def load_drafter(source: str, dtype: Any = "auto") -> PreTrainedModel:
    """The drafter in a directory or hub repository.

    Args:
        source: a path or a hub id.
        dtype: of its weights; "auto" is the type they are stored in.

    Raises:
        OSError, ValueError, TypeError: it cannot be read, by the field or tensor that is at fault.
    """
    drafter: Any = DFlashDraftModel.from_pretrained(source, dtype=dtype)
    return drafter


def load_drafter_config(source: str) -> PreTrainedConfig:
    """The config of the drafter in a directory or hub repository; errors as in `load_drafter`."""
    return DFlashConfig.from_pretrained(source)


def drafter_of(config: PreTrainedConfig) -> PreTrainedModel:
    """A drafter that ``config`` describes, with weights that nobody has trained."""
    return DFlashDraftModel(config)
