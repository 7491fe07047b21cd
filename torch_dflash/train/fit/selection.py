"""The candidate selector's loss: which of a row's likeliest tokens follows the true token before it.

Sources: dflash 0.1.0, ``CandidateSelector``; the loss as vllm-project/speculators (``dflash2/metrics.py``)
and verl-SpeCo (``DFlash2TrainingModel``) have it. Gradients flow into the drafter, as in the former; a row
whose truth is not among its candidates is left out, as in the latter.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.ops.control_flow import chunked
from torch_dflash.proposers.dflash.vocabulary import MarkovHead
from torch_dflash.proposers.dflash2.selector import CandidateSelector


@dataclass(frozen=True)
class Selection:
    """A selector, and the true token before each row: what it would be given if all before was right.

    So what it chooses here is what it drafts in decoding, up to a block's first error; behind that nothing
    is accepted.
    """

    selector: CandidateSelector
    previous: Int[Tensor, "B A N"]

    @property
    def count(self) -> int:
        """Candidates of a row."""
        return self.selector.candidates

    def losses(
        self,
        hidden: Float[Tensor, "R H"],
        candidates: Int[Tensor, "R K"],
        labels: Int[Tensor, " R"],
        vocabulary: Any,
        logits_of: Any,
        rows_per_chunk: int,
    ) -> tuple[Float[Tensor, " R"], Bool[Tensor, " R"], Bool[Tensor, " R"]]:
        """(cross-entropy over the candidates, whether the choice is right, whether the truth is listed).

        Args:
            candidates: places in ``vocabulary`` (a `LossVocabulary`) of each row's likeliest tokens.
            labels: the true tokens' places. logits_of: as of `block_losses`.
        """
        weight, bias, ids = vocabulary.weight, vocabulary.bias, vocabulary.ids
        # The codebooks know ids, whatever part of the vocabulary the candidates are of.
        known_as = candidates if ids is None else ids[candidates.long()]
        added = self.selector.transitions(hidden, self.previous.flatten(), known_as)

        def rows_of(hidden, candidates, added, labels):
            def head(rows):  # the head's rows of the candidates alone
                logits = torch.matmul(weight[candidates.long()], rows.to(weight.dtype)[..., None])[..., 0]
                return logits if bias is None else logits + bias[candidates.long()]

            scores = torch.log_softmax(logits_of(hidden, head).float() + added, dim=-1)
            true = candidates == labels[:, None]
            listed = true.any(-1)
            hit = listed & (torch.argmax(scores, dim=-1) == torch.argmax(true.int(), dim=-1))
            return -torch.where(true, scores, 0.0).sum(-1), hit, listed

        rows = hidden, candidates, added.float(), labels
        loss, hit, listed = chunked(rows_of, rows_per_chunk, *rows)
        return loss, hit, listed


# Source: vllm-project/speculators, ``models/dspark/core.py``: losses are of logits with the Markov head's.
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
        """``keys -> `` what is added to the logits of the ids of ``vocabulary`` (a `LossVocabulary`)."""
        weight, ids = self.head.markov_w2.weight, vocabulary.ids
        weight = weight if ids is None else weight[ids.long()]
        return lambda keys: F.linear(keys, weight)
