"""Finds writes through views in a model's forward, which a lowered program would lose."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from torch_dflash.targets.tested import TESTED, TESTED_RECURRENT, TRANSFORMERS

_TORCH = str(Path(torch.__file__).parent) + os.sep


class WritesToViews(TorchDispatchMode):
    """While open, records an in-place operation on a view, or on a tensor with views, in ``found``.

    A lowered program has values, not memory: a write through one view does not reach another. Writes in the
    file of a tested class are ignored, since its text was compared.
    """

    def __init__(self):
        super().__init__()
        self.found: str | None = None
        self._viewed: dict[int, Any] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for place, argument in enumerate(func._schema.arguments):
            written = argument.alias_info is not None and argument.alias_info.is_write
            tensor = args[place] if place < len(args) else kwargs.get(argument.name)
            many = tensor if isinstance(tensor, list | tuple) else [tensor]  # `_foreach_` operations
            viewed = any(isinstance(one, Tensor) and _storage(one) in self._viewed for one in many)
            if written and viewed and not _is_tested(sys._getframe(1)):
                self.found = func.__name__.partition(".")[0]
        out = func(*args, **kwargs)
        for tensor in out if isinstance(out, list | tuple) else [out]:
            if isinstance(tensor, Tensor) and any(_is_view(tensor, given) for given in args):
                self._viewed[_storage(tensor)] = tensor  # kept alive, so that its address is not reused
        return out


def _is_tested(frame: FrameType | None) -> bool:
    """Whether the innermost code outside torch, and outside other modes, is in a file with a tested class."""
    while frame is not None and (
        frame.f_code.co_filename.startswith(_TORCH) or frame.f_code.co_name == "__torch_dispatch__"
    ):
        frame = frame.f_back
    if frame is None or not frame.f_code.co_filename.startswith(TRANSFORMERS):
        return False
    return not (TESTED | TESTED_RECURRENT).isdisjoint(frame.f_globals)


def _storage(tensor: Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _is_view(tensor: Tensor, given: Any) -> bool:
    return isinstance(given, Tensor) and given is not tensor and _storage(given) == _storage(tensor)
