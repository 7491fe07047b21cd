"""The candidate selector's loss (`Selection`), and a Markov head's terms (`Chain`).

Sources: dflash 0.1.0, ``CandidateSelector``; the loss of vllm-project/speculators (``dflash2/metrics.py``)
and verl-SpeCo (``DFlash2TrainingModel``). Gradients flow into the drafter, as in the former; rows whose true
token is no candidate are left out, as in the latter.
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
    """A selector, and the true token before each row.

    Its choice here equals its draft in decoding up to a block's first error; later drafts are not accepted.
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
        """(cross-entropy over the candidates, whether the choice is right, whether the true token is listed).

        Args:
            candidates: places of each row's likeliest tokens in ``vocabulary``, a `LossVocabulary`.
            labels: places of the true tokens. logits_of: as of `block_losses`.
        """
        weight, bias, ids = vocabulary.weight, vocabulary.bias, vocabulary.ids
        # The codebooks go by ids, the candidates by places in the vocabulary.
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
    """A Markov head, and the true token before each row.

    The likeliest token here equals the draft in decoding up to a block's first error.
    """

    head: MarkovHead
    previous: Int[Tensor, "B A N"]

    def keys(self) -> Float[Tensor, "R K"]:
        """The head's lookup for each row."""
        return self.head.markov_w1(self.previous.flatten())

    def added(self, vocabulary: Any) -> Any:
        """A function from keys to terms for the logits of ``vocabulary``, a `LossVocabulary`."""
        weight, ids = self.head.markov_w2.weight, vocabulary.ids
        weight = weight if ids is None else weight[ids.long()]
        return lambda keys: F.linear(keys, weight)
