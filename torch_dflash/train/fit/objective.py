"""The loss: cross-entropy on the target's tokens, weighted along the block.

Sources: exponential decay, arXiv 2602.06036 section 4; D-PACE, arXiv 2605.18810 equations 7 to 9; sampled
softmax, Jean et al. 2015 (arXiv 1412.2007) section 3.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.ops.control_flow import chunked
from torch_dflash.pytrees import register_state
from torch_dflash.train.fit.options import Objective

# Published decay constants by block width; other widths are interpolated.
DECAYS = {8: 4.0, 10: 5.0, 16: 7.0}


def weights_of(
    objective: Objective, ce: Float[Tensor, "B A N"], known: Bool[Tensor, "B A N"]
) -> Float[Tensor, "B A N"]:
    """The weight of every row, without gradient."""
    count = ce.shape[-1]
    if objective.weighting == "dpace":
        confidence = (1 - objective.alpha) * torch.exp(-ce.detach()) + objective.alpha
        reach = torch.cumprod(confidence, dim=-1) * known
        # Suffix sums: the possible gain from row k on.
        return (reach.sum(-1, keepdim=True) - reach.cumsum(-1) + reach) / count
    gamma = objective.gamma or default_gamma(count + 1)
    decay = torch.exp(-torch.arange(count, device=ce.device, dtype=ce.dtype) / gamma)
    return (decay / decay.sum()).expand_as(ce)


def default_gamma(width: int) -> float:
    """The published decay constant for a block of ``width`` rows, linear between and beyond them."""
    if width in DECAYS:
        return DECAYS[width]
    return max(1.0, 4.0 + 3.0 * (width - 8) / 8)


@register_state
@dataclass(frozen=True)
class LossVocabulary:
    """The ids of the loss's softmax, with the head's rows for them.

    ``shift`` is added to each logit: log of the number of ids that a sampled id stands for.
    """

    weight: Float[Tensor, "C H"]
    bias: Float[Tensor, " C"] | None
    shift: Float[Tensor, " C"] | None
    index: Int[Tensor, " V"] | None  # place of every id in the rows above; None: all ids, in order
    ids: Int[Tensor, " C"] | None = None  # and the id of every row


@register_state
@dataclass(frozen=True)
class Losses:
    """Sums over a batch; divide by ``blocks`` (loss) or ``known`` (per position).

    ``ce`` and ``hits`` are per position; ``prefix`` counts blocks whose first k rows are all right, so
    ``1 + prefix.sum() / blocks`` is the acceptance length at random anchors. With a selector its choices
    count, and ``listed`` counts the true tokens among its candidates.
    """

    loss: Float[Tensor, ""]
    blocks: Float[Tensor, ""]
    known: Float[Tensor, " N"]
    ce: Float[Tensor, " N"]
    hits: Float[Tensor, " N"]
    prefix: Float[Tensor, " N"]
    listed: Float[Tensor, " N"] | None = None


def block_losses(
    hidden: Float[Tensor, "B A N H"],
    targets: Int[Tensor, "B A N"],
    known: Bool[Tensor, "B A N"],
    vocabulary: LossVocabulary,
    objective: Objective,
    logits_of: Any,
    teacher: Float[Tensor, "B A N H"] | None = None,
    selection: Any = None,
    chain: Any = None,
) -> Losses:
    """The objective of a batch of blocks from the states of their rows 1..W-1.

    Args:
        logits_of: ``(hidden, head) -> logits``, `DFlashDraftModel.logits`: multiplier and soft cap.
        teacher: the target's final states for the same rows, if ``objective.distils``.
        selection: the `Selection` of a drafter with a candidate selector; its loss is weighted along the
            block too.
        chain: the `Chain` of a drafter with a Markov head, which adds to all logits.
    """
    labels = targets if vocabulary.index is None else vocabulary.index[targets.long()]
    more = {"teacher": None if teacher is None else teacher.flatten(0, 2)}
    more |= {"keys": None if chain is None else chain.keys()}
    more = {name: rows for name, rows in more.items() if rows is not None}
    added = None if chain is None else chain.added(vocabulary)

    def head(rows):
        return F.linear(rows.to(vocabulary.weight.dtype), vocabulary.weight, vocabulary.bias)

    def rows_of(hidden, labels, *rows):
        given = dict(zip(more, rows, strict=True))
        logits = logits_of(hidden, head).float()
        if added is not None:
            logits = logits + added(given["keys"]).float()
        if selection is None:
            best = torch.argmax(logits, dim=-1) == labels
        else:  # the selector's candidates
            best = torch.topk(logits.detach(), min(selection.count, logits.shape[-1]), dim=-1).indices
            best = best.to(torch.int32)
        if vocabulary.shift is not None:
            logits = logits + vocabulary.shift
        scores = torch.log_softmax(logits, dim=-1)
        ce = -scores.gather(1, labels[:, None].long())[:, 0]
        if "teacher" not in given:
            return ce, torch.zeros_like(ce), best
        wanted = head(given["teacher"]).float() + (0 if vocabulary.shift is None else vocabulary.shift)
        wanted = torch.log_softmax(wanted, dim=-1)
        return ce, _divergence(objective, wanted, scores), best

    flat = hidden.flatten(0, 2), labels.flatten(), *more.values()
    ce, divergence, best = chunked(rows_of, objective.rows_per_chunk, *flat, recompute=chain is not None)
    per_row, hit, listed = objective.ce * ce + divergence, best, None
    if selection is not None:
        given = hidden.flatten(0, 2), best, labels.flatten(), vocabulary, logits_of, objective.rows_per_chunk
        chosen, hit, listed = selection.losses(*given)
        per_row, listed = per_row + objective.selector * chosen, listed.view(known.shape)
    ce, per_row, hit = (rows.view(known.shape) for rows in (ce, per_row, hit))
    weight = weights_of(objective, ce, known) * known
    accepted = torch.cumprod((hit & known).to(ce.dtype), dim=-1)
    return Losses(
        loss=(weight * per_row).sum(),
        blocks=known.any(-1).sum().to(ce.dtype),
        known=known.sum((0, 1)).to(ce.dtype),
        ce=(ce * known).sum((0, 1)).detach(),
        hits=(hit & known).sum((0, 1)).to(ce.dtype),
        prefix=accepted.sum((0, 1)),
        listed=None if listed is None else (listed & known).sum((0, 1)).to(ce.dtype),
    )


def _divergence(
    objective: Objective, wanted: Float[Tensor, "R C"], scores: Float[Tensor, "R C"]
) -> Float[Tensor, " R"]:
    """Each row's divergence from the target's distribution; both are log-probabilities."""
    total = torch.zeros_like(wanted[:, 0])
    if objective.kl:
        total = total + objective.kl * (wanted.exp() * (wanted - scores)).sum(-1)
    if objective.tv:
        total = total + objective.tv * 0.5 * (wanted.exp() - scores.exp()).abs().sum(-1)
    return total


def sample_vocabulary(
    weight: Float[Tensor, "V H"],
    bias: Float[Tensor, " V"] | None,
    always: Int[Tensor, " K"],
    sampled: int,
    generator: torch.Generator,
) -> LossVocabulary:
    """The ids ``always`` and ``sampled`` of the others, each standing for its share of them."""
    size = weight.shape[0]
    rest = torch.ones(size, dtype=torch.bool)
    rest[always.long()] = False
    others = rest.nonzero()[:, 0]
    drawn = others[torch.randperm(len(others), generator=generator)[:sampled]]
    ids = torch.cat([always.long(), drawn])
    index = torch.zeros(size, dtype=torch.int32)
    index[ids] = torch.arange(len(ids), dtype=torch.int32)
    shift = torch.zeros(len(ids))
    shift[len(always) :] = math.log(len(others) / max(len(drawn), 1))
    device = weight.device
    picked = ids.to(device)
    bias = None if bias is None else bias[picked]
    return LossVocabulary(weight[picked], bias, shift.to(device), index.to(device), picked.to(torch.int32))
