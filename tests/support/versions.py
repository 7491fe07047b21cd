"""Differences of older versions of transformers, found by ability and not by version number."""

from inspect import signature

import pytest
import torch
from transformers.generation import logits_process as processors
from transformers.integrations.moe import use_experts_implementation

from torch_dflash.proposers.checkpoint.extras import ends_in_blocks

needs_post_expert_norm = pytest.mark.skipif(
    "has_post_expert_norm" not in signature(use_experts_implementation).parameters,
    reason="this version's experts have no norm of their own",
)
needs_native = pytest.mark.skipif(not ends_in_blocks(), reason="this version's own loop is refused")


def _counts_padding() -> bool:
    try:
        processors.RepetitionPenaltyLogitsProcessor(1.1, torch.zeros(1, dtype=torch.long))
    except (TypeError, ValueError):
        return True
    return False


def _revives_banned_stops() -> bool:
    decay = processors.ExponentialDecayLengthPenalty((0, 1.5), [0], 0)
    return bool(decay(torch.zeros(1, 2), torch.tensor([[-torch.inf, 0.0]])).isnan().any())


def _biases_zero() -> bool:
    try:
        processors.SequenceBiasLogitsProcessor([[[0], 1.0]])
    except ValueError:
        return False
    return True


COUNTS_PADDING = _counts_padding()
"""Its repetition penalty takes the padding of a batch for text, so our door refuses such a batch."""
BIASES_ZERO = _biases_zero()
"""It takes a bias for the id 0."""
REVIVES_BANNED_STOPS = _revives_banned_stops()
"""Its length penalty makes NaN of a stop id that may not come yet, which is then taken."""
