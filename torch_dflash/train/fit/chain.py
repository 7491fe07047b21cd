"""DSpark's Markov head in the loss: each row is scored after the true token before it.

Source: vllm-project/speculators, ``models/dspark/core.py``: losses are of the logits with what the head adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.proposers.dflash.markov import MarkovHead


@dataclass(frozen=True)
class Chain:
    """A Markov head, and the true token before each row: what it would be given if all before was right.

    So the likeliest token here is what is drafted in decoding, up to a block's first error.
    """

    head: MarkovHead
    previous: Int[Tensor, "B A N"]

    def keys(self) -> Float[Tensor, "R K"]:
        """What the head looks up for each row."""
        return self.head.markov_w1(self.previous.flatten())

    def added(self, vocabulary: Any) -> Any:
        """``keys -> `` what is added to the logits of the ids of ``vocabulary`` (a `Vocabulary`)."""
        weight, ids = self.head.markov_w2.weight, vocabulary.ids
        weight = weight if ids is None else weight[ids.long()]
        return lambda keys: F.linear(keys, weight)
