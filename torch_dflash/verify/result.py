"""How far two ways to compute the same logits are apart, and whether rounding explains it."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDING = 2e-4
"""Differences that rounding explains in float32, as a share of the logits' spread."""
NOISE = 8
"""Differences between shapes that are rounding, in multiples of the model's own."""
MOST = {torch.float32: 5e-3, torch.float64: 5e-3, torch.float16: 0.5, torch.bfloat16: 1.1}
"""The same, as a share of the spread, at most: a model that is not causal differs from itself by more."""


@dataclass(frozen=True)
class Agreement:
    """How far block decoding's logits are from those of the target's own forward without a cache.

    Attributes:
        difference: largest difference of two logits.
        position: where it is: position of the row in its sequence.
        spread: standard deviation of the target's logits over the vocabulary.
        noise: largest difference of the target to itself: of forwards of two lengths, where they overlap, of
            one with its own cache, and of one whose embeddings are a rounding step off.
        compared: rows of logits that were compared.
        dtype: of the logits.
    """

    difference: float
    position: int
    spread: float
    noise: float
    compared: int
    dtype: torch.dtype

    @property
    def holds(self) -> bool:
        """Whether rounding explains the difference."""
        most = MOST.get(self.dtype, 0.5) * self.spread
        return self.difference <= max(min(NOISE * self.noise, most), ROUNDING * self.spread)

    def __str__(self) -> str:
        return (
            f"logits differ by {self.difference:.3g} at position {self.position} (they spread over "
            f"{self.spread:.3g}; the target differs from itself by {self.noise:.3g})"
        )
