"""Options of the features stage. The command line reads them without torch."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from torch_dflash.checks import Runtime, check_counts, check_runtime


class Layers(tuple):
    """Layer numbers (0-based), also from a text such as ``1,9,17``."""

    def __new__(cls, layers):
        if isinstance(layers, str):
            layers = [int(layer) for layer in layers.split(",")]
        return super().__new__(cls, layers)


def check_layers(taps: Iterable[int]) -> None:
    """Raise ``ValueError`` unless ``taps`` names at least one layer, and each once."""
    taps = list(taps)
    if not taps:
        raise ValueError("taps=[]: name at least one layer.")
    twice = sorted({tap for tap in taps if taps.count(tap) > 1})
    if twice:
        raise ValueError(f"taps={taps}: {twice} occur more than once; name each layer once.")


@dataclass(frozen=True)
class FeatureOptions:
    """How features are cached.

    Args:
        taps: target layers (0-based), also those of several drafters; unset: five, evenly spaced as z-lab's.
        max_length: longer conversations are cut at the end.
        batch_size: rows per target pass. shard_size: answers per file.
        dtype: "bfloat16" (2 bytes a value) or "float32". runtime: as in `torch_dflash.generate`.
    """

    taps: Layers | None = None
    max_length: int = 3072
    batch_size: int = 16
    shard_size: int = 128
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    runtime: Runtime = "xla"

    def __post_init__(self):
        check_counts(**{name: getattr(self, name) for name in ("max_length", "batch_size", "shard_size")})
        if self.taps is not None:
            check_layers(self.taps)
        check_runtime(self.runtime)
        if self.dtype not in ("bfloat16", "float32"):
            raise ValueError(f"dtype={self.dtype!r}: choose 'bfloat16' or 'float32'.")
