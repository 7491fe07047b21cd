"""`Agreement`: the difference of two computations of the same logits, and a bound for rounding."""

from __future__ import annotations

from dataclasses import dataclass

import torch

ROUNDING = 2e-4
"""Largest difference by rounding in float32, as a share of the logits' spread."""
NOISE = 8
"""Largest difference by rounding between shapes, as a multiple of the model's own."""
MOST = {torch.float32: 5e-3, torch.float64: 5e-3, torch.float16: 0.5, torch.bfloat16: 1.1}
"""Bound of `NOISE` times the noise, as a share of the spread: models that are not causal exceed it."""


@dataclass(frozen=True)
class Agreement:
    """Difference of block decoding's logits from those of the target's own forward without a cache.

    Attributes:
        difference: largest difference of two logits.
        position: the sequence position of that difference.
        spread: standard deviation of the target's logits over the vocabulary.
        noise: largest difference of the target from itself: between forwards of two lengths where they
            overlap, with its own cache, and with embeddings changed by a rounding step.
        compared: rows of logits compared.
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
