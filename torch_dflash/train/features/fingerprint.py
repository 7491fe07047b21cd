"""What tells one model from another: a checksum of a sample of its weights."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from torch_dflash.storage.checksums import bytes_of

SAMPLE = 64  # values of each parameter; a fine-tune changes nearly all


@dataclass(frozen=True)
class TargetFingerprint:
    """Whose features these are. Equal where the weights are, wherever they lie and in whatever float type."""

    name: str = field(compare=False)
    hidden_size: int
    weights: str

    @classmethod
    def of(cls, target: Any) -> TargetFingerprint:
        """The fingerprint of a live target."""
        hidden = target.get_input_embeddings().weight.shape[1]
        return cls(target.config.name_or_path, hidden, weights_fingerprint(target))

    def __str__(self) -> str:
        return f"{self.name or 'a target'} (hidden size {self.hidden_size}, weights {self.weights})"


def weights_fingerprint(module: nn.Module) -> str:
    """A checksum of the shapes and of values spread over every parameter; reads no more than these."""
    value = 0
    for parameter in module.parameters():
        flat = parameter.detach().flatten()
        # Rounded, so that a model loaded in bfloat16 is the one it was saved as.
        sample = flat[:: max(1, len(flat) // SAMPLE)][:SAMPLE].cpu().to(torch.bfloat16)
        value = zlib.crc32(repr(tuple(parameter.shape)).encode(), value)
        value = zlib.crc32(bytes_of(sample), value)
    return f"{value:08x}"
