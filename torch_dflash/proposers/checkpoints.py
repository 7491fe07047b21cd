"""Loads drafters of every known kind; a new kind joins `KINDS`."""

from __future__ import annotations

import os
from typing import Any

from transformers import PreTrainedConfig, PreTrainedModel

from torch_dflash.proposers.checkpoint.files import read_config
from torch_dflash.proposers.dflash.config import DFlashConfig, is_dflash2
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash2.model import DFlash2Config, DFlash2DraftModel
from torch_dflash.proposers.eagle3.model import Eagle3Config, Eagle3DraftModel
from torch_dflash.proposers.layouts.eagle3 import EAGLE3
from torch_dflash.proposers.layouts.known import in_zlabs_fields, layout_of
from torch_dflash.proposers.layouts.layout import Fields
from torch_dflash.proposers.medusa.model import MedusaConfig, MedusaDraftModel

KINDS: dict[bool, tuple[type[DFlashConfig], type[DFlashDraftModel]]] = {
    False: (DFlashConfig, DFlashDraftModel),
    True: (DFlash2Config, DFlash2DraftModel),
}
"""Config and model, by `is_dflash2`."""


def load_drafter(
    source: str | os.PathLike[str], target: Any = None, dtype: Any = "auto", **options: Any
) -> DFlashDraftModel | Eagle3DraftModel | MedusaDraftModel:
    """The drafter in a directory or hub repository, of any kind and layout.

    Args:
        source: a path or a hub id.
        target: the target model, its config, directory or hub id: a misfit is refused before any weight is
            read, and unusual fields are warned of. None: an engine checks when it is built.
        dtype: of the weights; "auto" is the stored type.
        **options: further options of ``from_pretrained`` (``revision``, ``subfolder``, ``token`` ...).

    Returns:
        A `DFlashDraftModel`, a `DFlash2DraftModel`, an `Eagle3DraftModel` or a `MedusaDraftModel`.

    Raises:
        OSError, ValueError, TypeError: names the field or tensor at fault.
    """
    read = read_config(source, options)
    if _is_medusa(read):
        return MedusaDraftModel.from_pretrained(source, target=target, dtype=dtype, **options)
    _, model = _kind(read, source)
    drafter: Any = model.from_pretrained(source, target=target, dtype=dtype, **{"config": read} | options)
    return drafter


def load_drafter_config(source: str | os.PathLike[str], **options: Any) -> PreTrainedConfig:
    """The config of the drafter in a directory or hub repository; options and errors as in `load_drafter`."""
    read = read_config(source, options)
    if _is_medusa(read):
        return MedusaConfig.from_dict(read)
    config, _ = _kind(read, source)
    return config.from_dict(config.in_our_fields(read, source))


def drafter_of(config: PreTrainedConfig) -> PreTrainedModel:
    """An untrained drafter of ``config``."""
    if isinstance(config, MedusaConfig):
        return MedusaDraftModel(config)
    if isinstance(config, Eagle3Config):
        return Eagle3DraftModel(config)
    return KINDS[isinstance(config, DFlash2Config)][1](config)


def _is_medusa(read: Fields) -> bool:
    return read.get("model_type") == MedusaConfig.model_type


def _kind(read: Fields, source: Any) -> tuple[Any, Any]:
    if layout_of(read) is EAGLE3:
        return Eagle3Config, Eagle3DraftModel
    return KINDS[is_dflash2(in_zlabs_fields(read, source))]
