"""Drafters from files. A new kind is entered here, and in `torch_dflash.proposers.choose`."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.dflash.model import DFlashDraftModel

KINDS: dict[type[PreTrainedConfig], type[PreTrainedModel]] = {DFlashConfig: DFlashDraftModel}
"""A drafter's model by its config's class."""


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
    return KINDS[type(config)](config)
