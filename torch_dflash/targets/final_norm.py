"""The norm between a target's last block and its head."""

from __future__ import annotations

from typing import Any

from torch import nn

from torch_dflash.targets.trace import blocks_of


def final_norm(target: Any) -> nn.Module | None:
    """The live target's module between its last block and its head; None without one.

    Raises:
        ValueError: the target is not supported.
    """
    path = blocks_of(target).norm
    return None if path is None else target.get_submodule(path)
