"""`CandidateSelector`: chooses each draft of a block by the draft before."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_dflash.ops.spread import likeliest
from torch_dflash.proposers.dflash.vocabulary import look_up
from torch_dflash.proposers.trees.nodes import Following


class CandidateSelector(nn.Module):
    """Chooses among each position's likeliest tokens, from the first position on.

    A candidate's score is its logit plus a bilinear term of three factors: the predecessor's codebook row,
    the position's hidden state, and the candidate's codebook row.

    Args:
        vocab: rows of both codebooks. hidden: channels of a hidden state. rank: columns of the codebooks.
        candidates: tokens to choose from at each position.

    Source: dflash 0.1.0, ``CandidateSelector``.
    """

    lookups = ("predecessor_codebook", "successor_codebook")  # tables read by rows

    def __init__(self, vocab: int, hidden: int, rank: int, candidates: int):
        super().__init__()
        self.candidates = candidates
        self.predecessor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.successor_codebook = nn.Parameter(torch.empty(vocab, rank))
        self.hidden_projection = nn.Linear(hidden, rank, bias=False)

    def begin_as_nothing(self, std: float) -> None:
        """Set weights that choose the likeliest candidate."""
        with torch.no_grad():
            self.predecessor_codebook.normal_(std=std)
            self.successor_codebook.zero_()
            self.hidden_projection.weight.normal_(std=std)

    def transitions(
        self, hidden: Float[Tensor, "R H"], previous: Int[Tensor, " R"], candidates: Int[Tensor, "R K"]
    ) -> Float[Tensor, "R K"]:
        """The bilinear term for each candidate's logit after ``previous``."""
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

        ``name``: maps places of ``logits`` to ids.
        """
        unary, places = torch.topk(logits, min(self.candidates, logits.shape[-1]), dim=-1)
        candidates, state, successors = self._candidates(hidden, places, name)
        chosen, drafts = anchor.to(candidates.dtype), []
        for at in range(hidden.shape[1]):
            key = look_up(chosen, self.predecessor_codebook) * state[:, at]
            scores = unary[:, at] + torch.einsum("br,bkr->bk", key, successors[:, at])
            best = torch.argmax(scores, dim=-1, keepdim=True)
            chosen = candidates[:, at].gather(-1, best)[:, 0]
            drafts.append(chosen)
        return torch.stack(drafts, dim=1)

    def followers(
        self,
        hidden: Float[Tensor, "B N H"],
        logits: Float[Tensor, "B N V"],
        scale: Float[Tensor, "B 1 1"],
        most: int,
        name: Callable[[Tensor], Tensor],
    ) -> Following:
        """The ``most`` best candidates at each position after any tokens.

        The candidates' total probability is that of ``logits``.
        """
        unary, places, every = likeliest(logits, scale, self.candidates)
        candidates, state, successors = self._candidates(hidden, places, name)
        some = torch.logsumexp((unary - unary[..., :1]) / scale, dim=-1)
        most = min(most, candidates.shape[-1])

        def after(at: int, before: Tensor) -> tuple[Tensor, Tensor]:
            key = look_up(before, self.predecessor_codebook) * state[:, at, None]
            scores = unary[:, at, None] + torch.einsum("bpr,bkr->bpk", key, successors[:, at])
            scores = (scores - scores.amax(dim=-1, keepdim=True)) / scale
            logs = torch.log_softmax(scores, dim=-1) + (some - every)[:, at, None, None]
            logs, best = logs.topk(most, dim=-1)
            ids = candidates[:, at, None].expand(*before.shape, -1).gather(-1, best)
            return ids.to(torch.int32), logs

        return after

    def _candidates(
        self, hidden: Tensor, places: Tensor, name: Callable[[Tensor], Tensor]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """(Ids of each position's candidates, the position's factor, the ids' codebook rows)."""
        candidates = name(places)
        successors = look_up(candidates, self.successor_codebook)
        return candidates, self.hidden_projection(hidden), successors
