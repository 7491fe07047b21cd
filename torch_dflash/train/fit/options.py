"""Options of the fit stage: the drafter's shape, the loss, and the training.

Frozen dataclasses, checked when made. The command line reads them without torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from torch_dflash.checks import check_counts
from torch_dflash.train.options import Layers, check_layers

Head = Literal["dflash", "convolutions", "dflash2", "dspark", "medusa", "eagle3"]
HEADS: tuple[str, ...] = get_args(Head)
"""v1; with DFlash2's convolutions; with these and its selector; with DSpark's Markov head; other kinds."""
LACKS = {
    "medusa": ("mask_token_id", "intermediate_size", "sliding_window"),
    "eagle3": ("mask_token_id", "layers", "sliding_window"),
}
"""Heads of other kinds than DFlash, and the fields of `DrafterShape` that they have no use for."""

SELECTOR = ("selector_rank", "selector_top_k")
SIZES_OF_HEADS = (*SELECTOR, "conv_group_size", "markov_rank")
_SIZES_OF = {
    "convolutions": ("conv_group_size",),
    "dflash2": ("conv_group_size", *SELECTOR),
    "dspark": ("markov_rank",),
}


def check_head(head: str | None, **sizes: int | None) -> None:
    """Raise ``ValueError`` for an unknown head, or sizes of parts that the head lacks."""
    if head is not None and head not in HEADS:
        raise ValueError(f"head={head!r}: choose one of {', '.join(HEADS)}.")
    for name, size in sizes.items():
        if size is None:
            continue
        if name not in _SIZES_OF.get(head or "dflash", ()):
            raise ValueError(f"{name}={size} with head={head!r}, which has none; choose another head.")
    if sizes.get("selector_top_k") == 1:
        raise ValueError("selector_top_k=1: of one candidate there is none to choose; head='convolutions'.")


@dataclass(frozen=True)
class DrafterShape:
    """The choices for a new drafter; other fields are the target's.

    Args:
        mask_token_id: an id in no text, with a row in the target's embedding: a special token unused by the
            chat template, or a padding row past the tokenizer's last id. For DFlash's heads.
        layers: draft layers, of medusa the residual blocks of a head; unset: 5, of medusa 1.
        block_size: rows W of a block, the anchor included.
        taps: tapped layers of the target (0-based), as in 1,9,17; unset: five evenly spaced, as z-lab's, of
            medusa the last, of eagle3 three.
        intermediate_size: width of the MLPs; unset: the target's.
        sliding_window: window of every draft layer, causal in the block; unset: full attention.
        head: dflash, v1; convolutions, v1 with DFlash2's convolutions; dflash2, also its candidate selector;
            dspark, v1 that drafts from the anchor's row on, with a Markov head; medusa, a head a position;
            eagle3, a pass a draft. Unset: dflash, or the head of the drafter to continue from.
        selector_rank: columns of the selector's codebooks; unset: 256, as published.
        selector_top_k: candidates that the selector chooses among; unset: 16, as published.
        conv_group_size: channels that share a convolution's dynamic kernel; unset: 16, as published.
        markov_rank: of the Markov head; unset: 256, as published.
        init_seed: of the random weights.

    Raises:
        ValueError: a value out of range.
    """

    mask_token_id: int | None = None
    layers: int | None = None
    block_size: int = 16
    taps: Layers | None = None
    intermediate_size: int | None = None
    sliding_window: int | None = None
    head: Head | None = None
    selector_rank: int | None = None
    selector_top_k: int | None = None
    conv_group_size: int | None = None
    markov_rank: int | None = None
    init_seed: int = 0

    def __post_init__(self):
        check_counts(least=0, mask_token_id=self.mask_token_id)
        check_counts(layers=self.layers, block_size=self.block_size, sliding_window=self.sliding_window)
        check_counts(intermediate_size=self.intermediate_size)
        check_counts(selector_rank=self.selector_rank, selector_top_k=self.selector_top_k)
        check_counts(conv_group_size=self.conv_group_size, markov_rank=self.markov_rank)
        check_head(self.head, **self.sizes)
        for name in LACKS.get(self.head or "", ()):
            if getattr(self, name) is not None:
                given = f"{name}={getattr(self, name)} with head={self.head!r}"
                raise ValueError(f"{given}, which has none; leave it out.")
        if self.taps is not None:
            check_layers(self.taps)

    @property
    def sizes(self) -> dict[str, int | None]:
        """Sizes of the parts that v1 lacks."""
        return {name: getattr(self, name) for name in SIZES_OF_HEADS}


@dataclass(frozen=True)
class Objective:
    """The loss of a block: ``sum_k w_k (ce * ce_k + kl * kl_k + tv * tv_k + selector * s_k)``, averaged.

    ``s_k`` is the candidate selector's cross-entropy, 0 where the true token is no candidate (`Selection`)
    or without a selector.

    Args:
        weighting: "decay", ``w_k = exp(-(k-1)/gamma)`` normalised over the block; or "dpace", ``w_k`` = the
            effect of row k on the expected accepted length by the drafter's present confidence.
        gamma: decay constant; unset: the published one for the width (7 at 16, 5 at 10, 4 at 8).
        alpha: D-PACE's smoothing of the confidence, ``(1-alpha) q + alpha``.
        ce: weight of the cross-entropy on the target's tokens.
        kl: weight of the KL divergence from the target's distribution to the drafter's; 0: not computed.
        tv: weight of the total variation distance between the two; 0: not computed. 0.9 with ``ce`` 0.1 is
            speculators' mix.
        selector: weight of the candidate selector's loss, for a DFlash2 drafter.
        rows_per_chunk: rows whose logits exist at a time; the rest are recomputed in the backward pass.

    Raises:
        ValueError: a value out of range.
    """

    weighting: Literal["decay", "dpace"] = "decay"
    gamma: float | None = None
    alpha: float = 0.5
    ce: float = 1.0
    kl: float = 0.0
    tv: float = 0.0
    selector: float = 0.1
    rows_per_chunk: int = 1024

    def __post_init__(self):
        if self.weighting not in ("decay", "dpace"):
            raise ValueError(f"weighting={self.weighting!r}: choose 'decay' or 'dpace'.")
        if self.gamma is not None and not self.gamma > 0:
            raise ValueError(f"gamma={self.gamma}: must be above 0.")
        if not 0 < self.alpha <= 1:
            raise ValueError(f"alpha={self.alpha}: must be above 0 and at most 1.")
        for name in ("ce", "kl", "tv", "selector"):
            if not 0 <= getattr(self, name) < math.inf:
                raise ValueError(f"{name}={getattr(self, name)}: must be a finite number of at least 0.")
        if not self.ce + self.kl + self.tv > 0:
            raise ValueError("ce=0 with kl=0 and tv=0: nothing would be learnt; give one of them a weight.")
        check_counts(rows_per_chunk=self.rows_per_chunk)

    @property
    def distils(self) -> bool:
        """Whether the loss needs the target's distributions, and so its last layer's outputs."""
        return self.kl > 0 or self.tv > 0


@dataclass(frozen=True)
class FitOptions:
    """Defaults are the paper's (arXiv 2602.06036 section 5.1) where it gives them.

    Args:
        epochs: passes over the data; anchors are redrawn in each.
        steps: of the whole fit, in place of epochs; the learning rate ends with them.
        batch_size: sequences per process and micro-batch. accumulation: micro-batches per step.
        anchors: most blocks drafted per sequence and epoch.
        learning_rate: peak of AdamW's rate. warmup: share of all steps in which it rises; a cosine follows.
        final_rate: rate at the end, as a share of the peak.
        weight_decay: decoupled, on all weights. clip: largest norm of the gradient.
        mixed_precision: "no", or "bf16" for products in bfloat16 with float32 weights.
        sampled_vocabulary: ids sampled per step, besides the answers', for the loss's softmax; unset: the
            whole vocabulary. Saves most of the time where the head dominates (a CPU, a small drafter).
        freeze: train only the parts that --head adds to the drafter of --start-from.
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
    mixed_precision: Literal["no", "bf16"] = "no"
    sampled_vocabulary: int | None = None
    freeze: bool = False
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
