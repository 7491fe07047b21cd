"""The norm between a target's last block and its head."""

from __future__ import annotations

from typing import Any

from torch import nn


def final_norm(target: Any) -> nn.Module | None:
    """The live target's own, where its decoder has one by the name of ``norm``."""
    norm = getattr(target.get_decoder(), "norm", None)
    return norm if isinstance(norm, nn.Module) else None
