"""How many drafts of each block the target would accept, by a convention: teacher-forced on its own text."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.doctor.convention import Convention
from torch_dflash.doctor.recorded import Recorded
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.target.final_norm import final_norm
from torch_dflash.train.fit.blocks import Batch, block_targets, draft_blocks


class Judge:
    """Blocks of recorded texts, drafted as one likes.

    Args:
        target, drafter: the pair; neither is changed.
        recorded: of the target.
        blocks: how many in all; their anchors lie evenly over the answers.
    """

    def __init__(
        self, target: Any, drafter: DFlashDraftModel, recorded: Sequence[Recorded], blocks: int = 256
    ):
        self.target, self.drafter, self.recorded = target, drafter, list(recorded)
        self.width = drafter.config.block_size
        self._embedding = target.get_input_embeddings().weight
        places = [
            (at, place)
            for at, one in enumerate(self.recorded)
            for place in range(one.text.start, len(one.text.ids) - 1)
        ]
        step = max(1.0, len(places) / blocks)
        self.places = [places[int(i * step)] for i in range(min(blocks, len(places)))]

    @torch.no_grad()
    def __call__(self, convention: Convention, every: int = 1) -> Int[Tensor, " blocks"]:
        """Accepted drafts of each block, or of each ``every``-th one."""
        twin, places = convention.applied(self.drafter), self.places[::every]
        counts = []
        for at, one in enumerate(self.recorded):
            anchors = [place for text, place in places if text == at]
            if anchors:
                counts.append(self.count(twin, convention, one, anchors))
        return torch.cat(counts)

    def count(
        self, twin: Any, convention: Convention, one: Recorded, anchors: list[int]
    ) -> Int[Tensor, " A"]:
        """Accepted drafts of the blocks at ``anchors``."""
        batch = self.batch(convention, one, anchors)
        rows, (wanted, known) = self.rows(twin, convention, batch), block_targets(batch, self.width)
        counts = torch.zeros(len(anchors), dtype=torch.int32, device=rows.device)
        alive = torch.arange(len(anchors), device=rows.device)
        for row in range(self.width - 1):  # the head is most of the work, and few rows need it
            tokens = self.read(twin, convention, rows[:, alive, row : row + 1])[0, :, 0].argmax(dim=-1)
            alive = alive[(tokens == wanted[0, alive, row]) & known[0, alive, row]]
            counts[alive] += 1
        return counts.cpu()

    def batch(self, convention: Convention, one: Recorded, anchors: list[int]) -> Batch:
        """What the drafter is given of a text."""
        states = [one.states[tap + 1] for tap in convention.taps]
        norm = final_norm(self.target) if convention.normed else None
        features = torch.cat([state if norm is None else norm(state) for state in states], dim=-1)
        device = features.device
        return Batch(
            ids=one.text.ids[None].to(device).int(),
            length=torch.tensor([len(one.text.ids)], device=device, dtype=torch.int32),
            features=features[None],
            anchors=torch.tensor([anchors], device=device, dtype=torch.int32),
        )

    def rows(self, twin: Any, convention: Convention, batch: Batch) -> Float[Tensor, "B A N H"]:
        """The drafter's states that stand for the tokens behind each anchor."""
        hidden = draft_blocks(twin, batch, self._embedding, self.width)
        return hidden[:, :, convention.first_row : convention.first_row + self.width - 1]

    def read(
        self, twin: Any, convention: Convention, rows: Float[Tensor, "B A N H"]
    ) -> Float[Tensor, "B A N V"]:
        """What the drafter says by such states."""
        head = self.target.get_output_embeddings()
        if convention.tied:
            return twin.logits(rows.to(self._embedding.dtype), lambda rows: F.linear(rows, self._embedding))
        return twin.logits(rows.to(head.weight.dtype), head)


def standard_score(new: Tensor, old: Tensor) -> float:
    """By how many standard errors ``new`` is better than ``old``, block by block."""
    gain = (new - old).double()
    error = gain.std() / max(1, len(gain)) ** 0.5
    return float(gain.mean() / error) if error > 0 else 0.0 if gain.mean() == 0 else float(len(gain))
