"""A drafter's embedding, head and vocabulary: the target's or its own."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from torch_dflash.ops.control_flow import branch
from torch_dflash.ops.spread import likeliest
from torch_dflash.ops.windows import positions
from torch_dflash.proposers.checkpoint.extras import has_smaller_vocabulary
from torch_dflash.proposers.trees.nodes import Following
from torch_dflash.sampling import noisy_logits
from torch_dflash.state import DraftRequest


class Noise(NamedTuple):
    """The sampling noise of rows.

    Attributes:
        sampled: [B], rows with noise.
        added: (draft logits [B, N, V], the target's ids of the V places) -> logits [B, N, V] with noise.
        scale: [B], divisor of logits before softmax; 1 for a greedy row.
    """

    sampled: Bool[Tensor, " B"]
    added: Callable[[Tensor, int | Tensor], Tensor]
    scale: Float[Tensor, " B"]


def noise_of(length: Tensor, request: DraftRequest) -> Noise:
    """The sampled rows' noise at the positions of their drafts."""
    sampling, sampled = request.sampling, request.sampling.temperature > 0
    return Noise(
        sampled,
        lambda logits, ids: noisy_logits(logits, positions(length + 1, logits.shape[1]), sampling, ids),
        torch.where(sampled, sampling.temperature, 1.0).clamp(min=1e-30),
    )


class DraftVocabulary:
    """Mixin: from ids to embeddings and from hidden states to drafts, with the model's weights.

    - ``embed_tokens`` in place of the target's embedding, of the same ids.
    - ``mask_embedding`` [H] in place of the embedding of ``mask_token_id``.
    - ``lm_head`` in place of the target's head. With fewer rows than the target has ids, row k stands for the
      target's id ``k + d2t[k]``: ``d2t`` holds offsets, as EAGLE-3's does.
    - ``markov_head``, DSpark's: each draft depends on the draft before.

    Sources: speculators 0.9.0, ``models/dflash`` and ``models/dspark``; vLLM's ``qwen3_dflash.py``.
    """

    config: Any
    embed_tokens: nn.Embedding | None
    lm_head: nn.Linear | None
    mask_embedding: nn.Parameter | None
    d2t: Tensor | None
    markov_head: MarkovHead | None

    def add_vocabulary(self: Any, config: Any) -> None:
        """Create the weights that ``config`` names; the other attributes are None."""
        hidden, rows = config.hidden_size, config.draft_vocab_size or config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, hidden) if config.own_embedding else None
        self.lm_head = nn.Linear(hidden, rows, bias=False) if config.own_head else None
        self.mask_embedding = nn.Parameter(torch.zeros(hidden)) if config.mask_embedding else None
        offsets = torch.zeros(rows, dtype=torch.int64) if has_smaller_vocabulary(config) else None
        self.register_buffer("d2t", offsets)
        rank = config.markov_rank
        self.markov_head = MarkovHead(config.vocab_size, rows, rank) if rank else None

    def embed(self, ids: Int[Tensor, "B W"], embed: Any, dtype: torch.dtype) -> Float[Tensor, "B W H"]:
        """A block's rows: ``embed(ids)``, or the drafter's own, times ``input_embedding_scale``."""
        mask, table, masked = self.mask_embedding, self.embed_tokens, ids == self.config.mask_token_id
        known = ids if mask is None else torch.where(masked, 0, ids)  # the mask id may have no row
        rows = (embed(known) if table is None else look_up(known, table.weight)).to(dtype)
        if mask is not None:
            rows = torch.where(masked[..., None], mask.to(dtype), rows)
        return rows * self.config.input_embedding_scale

    def choose(
        self,
        hidden: Float[Tensor, "B N H"],
        anchor: Int[Tensor, " B"],
        head,
        noise: Noise | None = None,
    ) -> Int[Tensor, "B N"]:
        """The drafts after ``anchor`` from their rows' hidden states; the target's ids."""
        logits = self.logits(hidden, head)
        if noise is None:
            return self.chosen(hidden, logits, anchor)
        known = self._known_ids(logits)

        def noisy(hidden: Tensor, logits: Tensor, anchor: Tensor) -> Tensor:
            return self.chosen(hidden, noise.added(logits, known), anchor)

        # A greedy batch must not pay for noise.
        return branch(noise.sampled.any(), noisy, self.chosen, hidden, logits, anchor)

    def chosen(
        self, hidden: Float[Tensor, "B N H"], logits: Float[Tensor, "B N V"], anchor: Int[Tensor, " B"]
    ) -> Int[Tensor, "B N"]:
        """The best drafts by ``logits``; the target's ids."""
        if self.markov_head is None:
            return self._likeliest(logits)
        before, drafts = anchor, []
        for at in range(hidden.shape[1]):
            added = self.markov_head(before)
            both = min(logits.shape[-1], added.shape[-1])  # ids missing in either are not drafted
            before = self._likeliest(logits[:, at, :both] + added[:, :both])
            drafts.append(before)
        return torch.stack(drafts, dim=1)

    def _likeliest(self, logits: Float[Tensor, "*R V"]) -> Int[Tensor, "*R"]:
        return self.targets_ids(torch.argmax(logits, dim=-1)).to(torch.int32)

    def branches(self, hidden: Float[Tensor, "B N H"], head, noise: Noise, most: int) -> Following:
        """The ``most`` likeliest drafts at each position, of sampled rows by the noisy logits.

        Log-probabilities of a sampled row are those of ``log_softmax(logits / temperature + noise)``.
        """
        logits = self.logits(hidden, head).to(torch.float32)
        known = self._known_ids(logits)
        noisy = branch(noise.sampled.any(), lambda logits: noise.added(logits, known), torch.clone, logits)
        return self.followers(hidden, noisy, noise.scale[:, None, None], most)

    def followers(
        self,
        hidden: Float[Tensor, "B N H"],
        logits: Float[Tensor, "B N V"],
        scale: Float[Tensor, "B 1 1"],
        most: int,
    ) -> Following:
        """The ``most`` likeliest of ``logits`` / ``scale`` at each position; the target's ids."""

        def drafts(logits: Tensor) -> tuple[Tensor, Tensor]:
            best, places, total = likeliest(logits, scale, most)
            ids = self.targets_ids(places).to(torch.int32)
            return ids, (best - best[..., :1]) / scale - total[..., None]

        markov = self.markov_head
        if markov is None:
            ids, logs = drafts(logits)
            return lambda at, before: (ids[:, at, None], logs[:, at, None])

        def after(at: int, before: Tensor) -> tuple[Tensor, Tensor]:
            added = markov(before)
            both = min(logits.shape[-1], added.shape[-1])  # ids missing in either are not drafted
            return drafts(logits[:, at, None, :both] + added[..., :both])

        return after

    def _known_ids(self, logits: Float[Tensor, "B N V"]) -> int | Int[Tensor, " V"]:
        """The target's ids of all places; the count of places where both are equal."""
        if self.d2t is None:
            return logits.shape[-1]
        places = torch.arange(len(self.d2t), device=self.d2t.device)
        return self.targets_ids(places).to(torch.int32)

    def targets_ids(self, places: Int[Tensor, "*R"]) -> Int[Tensor, "*R"]:
        """The target's ids of places among the draft logits."""
        return places if self.d2t is None else places + self.d2t[places]

    def logits(self, hidden: Float[Tensor, "B N H"], head) -> Float[Tensor, "B N V"]:
        """Draft logits through ``head``, or the drafter's own, with its multiplier and soft cap.

        V is the drafter's vocabulary, which `choose` maps to the target's. A Markov head adds later.
        """
        logits = (head if self.lm_head is None else self.lm_head)(hidden)
        multiplier, cap = self.config.output_multiplier, self.config.final_logit_softcapping
        if multiplier != 1:  # a pass over all logits, and in training two more
            logits = logits * multiplier
        return torch.tanh(logits / cap) * cap if cap else logits


class MarkovHead(nn.Module):
    """Logits that a token adds for the next token: ``W2 W1[token]``, without the hidden state.

    Args:
        ids: the target's, rows of W1. drafted: the drafter's, rows of W2. rank: columns of both.

    Source: vllm-project/speculators, ``models/dspark``, its "vanilla" head.
    """

    def __init__(self, ids: int, drafted: int, rank: int):
        super().__init__()
        self.markov_w1 = nn.Embedding(ids, rank)
        self.markov_w2 = nn.Linear(rank, drafted, bias=False)

    def begin_as_nothing(self) -> None:
        """Set weights that add nothing."""
        nn.init.zeros_(self.markov_w2.weight)

    def forward(self, before: Int[Tensor, "*R"]) -> Float[Tensor, "*R V"]:
        """Logits to add after the tokens ``before``, the target's ids."""
        return self.markov_w2(look_up(before, self.markov_w1.weight))


def look_up(ids: Int[Tensor, "*R"], table: Float[Tensor, "V K"]) -> Float[Tensor, "*R K"]:
    """The rows ``ids`` of a drafter's table; an id beyond the table reads the last row."""
    return F.embedding(ids.clamp(max=table.shape[0] - 1), table)
