"""A control for evaluations: the same drafter, told about the wrong conversation."""

from __future__ import annotations

from typing import Any

import torch

from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash.proposer import DFlashProposer, DFlashState


class ShuffledFeatures(DFlashProposer):
    """Drafts with every batch row's features taken from the next row; needs a batch of 2 or more.

    What the drafter still accepts it owes to the anchor's embedding and to the commonest tokens, so the
    distance to its true acceptance length is what it learned to read from the target's states.
    """

    name = "shuffled"

    def __init__(self, drafter: DFlashDraftModel):
        super().__init__(drafter)
        self.drafter: Any = drafter  # with its weights: the engine copies a proposer whole

    def ingest(self, pstate, features, ids, next_ids, count) -> DFlashState:
        return super().ingest(pstate, torch.roll(features, 1, dims=0), ids, next_ids, count)

    def observe(self, pstate, features, ids, next_ids, count) -> DFlashState:
        return super().observe(pstate, torch.roll(features, 1, dims=0), ids, next_ids, count)
