"""The candidate selector: drafts of one pass are chained, each with the draft before it in view."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_dflash.proposers.dflash.markov import look_up


class CandidateSelector(nn.Module):
    """Chooses one of each position's likeliest tokens, from the first position on.

    A candidate's score is its logit plus a bilinear term of three factors: the predecessor's codebook row,
    the position's hidden state, and the candidate's codebook row.

    Args:
        vocab: rows of both codebooks. hidden: channels of a hidden state. rank: columns of the codebooks.
        candidates: tokens of a position among which is chosen.

    Source: dflash 0.1.0, ``CandidateSelector``.
    """

    lookups = ("predecessor_codebook", "successor_codebook")  # tables of which rows are read

    def __init__(self, vocab: int, hidden: int, rank: int, candidates: int):
        super().__init__()
        self.candidates = candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def begin_as_nothing(self, std: float) -> None:
        """Weights with which the likeliest candidate is chosen."""
        with torch.no_grad():
            self.predecessor_codebook.normal_(std=std)
            self.successor_codebook.zero_()
            self.hidden_projection.weight.normal_(std=std)

    def transitions(
        self, hidden: Float[Tensor, "R H"], previous: Int[Tensor, " R"], candidates: Int[Tensor, "R K"]
    ) -> Float[Tensor, "R K"]:
        """What follows ``previous`` adds to each candidate's logit: the bilinear term, of any rows."""
        key = look_up(previous, self.predecessor_codebook) * self.hidden_projection(hidden)
        return torch.matmul(look_up(candidates, self.successor_codebook), key[..., None])[..., 0]

    def forward(
        self,
        hidden: Float[Tensor, "B N H"],
        logits: Float[Tensor, "B N V"],
        anchor: Int[Tensor, " B"],
        name: Callable[[Tensor], Tensor] = lambda drafted: drafted,
    ) -> Int[Tensor, "B N"]:
        """The drafts after ``anchor``: at each position the best-scored candidate.

        ``name``: from the places of ``logits`` to ids, where these have places of their own.
        """
        unary, places = torch.topk(logits, min(self.candidates, logits.shape[-1]), dim=-1)
        candidates = name(places)
        state = self.hidden_projection(hidden)
        successors = look_up(candidates, self.successor_codebook)
        chosen, drafts = anchor.to(candidates.dtype), []
        for at in range(hidden.shape[1]):
            key = look_up(chosen, self.predecessor_codebook) * state[:, at]
            scores = unary[:, at] + torch.einsum("br,bkr->bk", key, successors[:, at])
            best = torch.argmax(scores, dim=-1, keepdim=True)
            chosen = candidates[:, at].gather(-1, best)[:, 0]
            drafts.append(chosen)
        return torch.stack(drafts, dim=1)
