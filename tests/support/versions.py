"""What older versions of transformers do otherwise, by what they can do and not by their numbers."""

from __future__ import annotations

import pytest
import torch
from transformers.generation import logits_process as processors

from torch_dflash.proposers.dflash.native import ends_in_blocks

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


COUNTS_PADDING = _counts_padding()
"""Its repetition penalty takes the padding of a batch for text, so our door refuses such a batch."""
REVIVES_BANNED_STOPS = _revives_banned_stops()
"""Its length penalty makes NaN of a stop id that may not come yet, which is then taken."""
