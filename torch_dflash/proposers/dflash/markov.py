"""DSpark's Markov head: the token before a draft adds to the logits of all ids that may follow it."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn


class MarkovHead(nn.Module):
    """What a token adds to the logits after it: ``W2 W1[token]``, whatever the hidden state.

    Args:
        ids: of the target, rows of W1. said: of the drafter, rows of W2. rank: columns of both.

    Source: vllm-project/speculators, ``models/dspark``, its "vanilla" head.
    """

    def __init__(self, ids: int, said: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(ids, rank)
        self.markov_w2 = nn.Linear(rank, said, bias=False)

    def begin_as_nothing(self) -> None:
        """Weights with which nothing is added."""
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Int[Tensor, "*R"]) -> Float[Tensor, "*R V"]:
        """What is added to the logits after the tokens ``before``, the target's ids."""
        return self.markov_w2(look_up(before, self.markov_w1.weight))


def look_up(ids: Int[Tensor, "*R"], table: Float[Tensor, "V K"]) -> Float[Tensor, "*R K"]:
    """The rows ``ids`` of a drafter's table; an id of the target's beyond the table reads its last row."""
    return F.embedding(ids.clamp(max=table.shape[0] - 1), table)
