"""How a drafter is fitted: one frozen dataclass, checked when it is made."""

from __future__ import annotations

import math
from dataclasses import dataclass

from torch_dflash.checks import check_counts


@dataclass(frozen=True)
class FitOptions:
    """Defaults are the paper's (arXiv 2602.06036 section 5.1) where it gives them.

    Args:
        epochs: passes over the data; anchors are redrawn in each.
        steps: of the whole fit, in place of what the epochs make; the learning rate ends with them.
        batch_size: sequences per process and micro-batch. accumulation: micro-batches per step.
        anchors: most blocks drafted per sequence and epoch.
        learning_rate: peak of AdamW's rate. warmup: share of all steps in which it rises; a cosine follows.
        final_rate: rate at the end, as a share of the peak.
        weight_decay: decoupled, on all weights. clip: largest norm of the gradient.
        mixed_precision: "no", or "bf16" for products in bfloat16 with float32 weights.
        sampled_vocabulary: ids sampled per step beside those of the answers for the loss's softmax; unset:
            the whole vocabulary. Saves most of the time where the head dominates (a CPU, a small drafter).
        held_out: sequences kept for validation. evaluate_minutes: time between two validations.
        checkpoint_minutes: time between two checkpoints. seed: of anchors, order and sampled ids.
        log_steps: steps between two lines of the log.

    Raises:
        ValueError: a value out of range, by name.
    """

    epochs: int = 6
    steps: int | None = None
    batch_size: int = 4
    accumulation: int = 1
    anchors: int = 512
    learning_rate: float = 6e-4
    warmup: float = 0.04
    final_rate: float = 0.0
    weight_decay: float = 0.01
    clip: float = 1.0
    mixed_precision: str = "no"
    sampled_vocabulary: int | None = None
    held_out: int = 64
    evaluate_minutes: float = 5.0
    checkpoint_minutes: float = 10.0
    seed: int = 0
    log_steps: int = 10

    def __post_init__(self):
        counts = ("epochs", "batch_size", "accumulation", "anchors", "held_out", "log_steps")
        check_counts(**{name: getattr(self, name) for name in counts})
        check_counts(sampled_vocabulary=self.sampled_vocabulary, steps=self.steps)
        for name in ("learning_rate", "clip"):
            if not getattr(self, name) > 0:
                raise ValueError(f"{name}={getattr(self, name)!r}: must be above 0; nothing would be learnt.")
        for name, least, most in (
            ("learning_rate", 0.0, 1.0),
            ("warmup", 0.0, 1.0),
            ("final_rate", 0.0, 1.0),
            ("weight_decay", 0.0, 1.0),
            ("evaluate_minutes", 0.0, math.inf),
            ("checkpoint_minutes", 0.0, math.inf),
        ):
            value = getattr(self, name)
            if not least <= value <= most:
                raise ValueError(f"{name}={value!r}: must lie between {least:g} and {most:g}.")
        if self.mixed_precision not in ("no", "bf16"):
            raise ValueError(f"mixed_precision={self.mixed_precision!r}: choose 'no' or 'bf16'.")

    def rate(self, step: int, steps: int) -> float:
        """The learning rate of 0-based ``step`` of ``steps``: linear warmup, then a cosine."""
        rising = max(1, round(self.warmup * steps))
        if step < rising:
            return self.learning_rate * (step + 1) / rising
        done = (step - rising) / max(1, steps - rising)
        share = self.final_rate + (1 - self.final_rate) * 0.5 * (1 + math.cos(math.pi * done))
        return self.learning_rate * share
