"""`Student`: a drafter between the target's frozen embedding and head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from torch_dflash.proposers.checkpoint.extras import refuse_extras
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.pair import check_pair, tables_of_ids
from torch_dflash.targets.final_norm import final_norm
from torch_dflash.train.features.tensorfiles import TargetFingerprint, weights_fingerprint
from torch_dflash.train.fit.blocks import (
    AnchorBatch,
    block_targets,
    draft_blocks,
    gather_rows,
    previous_tokens,
)
from torch_dflash.train.fit.objective import Losses, LossVocabulary, block_losses
from torch_dflash.train.fit.options import Objective
from torch_dflash.train.fit.selection import Chain, Selection

KNOWN = ("sample_from_anchor", "markov_rank")
"""Extras of a drafter that a fit trains."""


class Student(nn.Module):
    """Losses of the drafter's blocks against the target's tokens; only the drafter is trained.

    Args:
        drafter: trained in place. target: gives embedding, head and, for losses against its
            distributions, the final norm.
        objective: the loss. width: rows W of a draft, the anchor included; unset: the drafter's.
        head_dtype: of the head's products ("bfloat16" for mixed precision); unset: the head's own.

    Raises:
        ValueError: the drafter has parts not in `KNOWN`, or does not fit the target; or the loss needs a
            part that the target lacks.
    """

    embedding: torch.Tensor
    head_weight: torch.Tensor
    head_bias: torch.Tensor | None

    def __init__(
        self,
        drafter: DFlashDraftModel,
        target: Any,
        objective: Objective,
        width: int | None = None,
        head_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        refuse_extras(drafter.config, "training", "train one with the target's embedding and head.", KNOWN)
        check_pair(target, drafter)
        _check_tables(drafter.config, target)
        self.drafter = drafter
        self.objective = objective
        self.target = TargetFingerprint.of(target)
        self.start_weights = weights_fingerprint(drafter)  # now: a fit trains it in place
        self.first_row = int(not drafter.config.sample_from_anchor)
        self.width = drafter.config.block_size + 1 - self.first_row if width is None else width
        self.last_layer = target.config.get_text_config().num_hidden_layers - 1
        head = target.get_output_embeddings()
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        # Buffers outside the state dict: moved with the module, never trained, never saved.
        self.register_buffer("embedding", target.get_input_embeddings().weight.detach(), persistent=False)
        self.register_buffer("head_weight", weight.to(head_dtype or weight.dtype), persistent=False)
        self.register_buffer("head_bias", bias, persistent=False)
        self.final_norm: Any = _frozen_norm(target) if objective.distils else None

    def forward(self, batch: AnchorBatch, vocabulary: LossVocabulary | None = None) -> Losses:
        """Sums over the batch; ``vocabulary`` unset: the loss runs over all ids."""
        rows = self.width - 1 + self.first_row
        hidden = draft_blocks(self.drafter, batch, self.embedding, rows)[:, :, self.first_row :]
        targets, known = block_targets(batch, self.width)
        teacher = None
        if self.final_norm is not None:
            last: Any = batch.last  # given for these losses
            at = batch.anchors.clamp(min=0)[..., None] + torch.arange(self.width - 1, device=hidden.device)
            # The target picks the k-th token from its state one position before.
            teacher = self.final_norm(gather_rows(last, at.clamp(max=batch.ids.shape[1] - 1)))
        if vocabulary is None:
            vocabulary = LossVocabulary(self.head_weight, self.head_bias, None, None)
        rule = self.objective, self.drafter.logits, teacher, self._selection(batch), self._chain(batch)
        return block_losses(hidden, targets, known, vocabulary, *rule)

    def _selection(self, batch: AnchorBatch) -> Selection | None:
        drafter: Any = self.drafter
        if not drafter.config.dflash2:
            return None
        return Selection(drafter.candidate_selector, previous_tokens(batch, self.width))

    def _chain(self, batch: AnchorBatch) -> Chain | None:
        drafter: Any = self.drafter
        if drafter.markov_head is None:
            return None
        return Chain(drafter.markov_head, previous_tokens(batch, self.width))


def _check_tables(config: Any, target: Any) -> None:
    # A draft of an id without a row would have no loss.
    tables, rows = tables_of_ids(config), target.get_output_embeddings().weight.shape[0]
    if tables and config.vocab_size != rows:
        raise ValueError(
            f"vocab_size={config.vocab_size} of the drafter's {tables[0]}, but the target has {rows} ids: a "
            "fit needs both alike; begin a drafter for this target."
        )


def _frozen_norm(target) -> nn.Module:
    norm = final_norm(target)
    cap = getattr(target.config.get_text_config(), "final_logit_softcapping", None)
    if norm is None or cap is not None:
        raise ValueError(
            f"kl > 0 or tv > 0 with target={type(target).__name__}: such losses need a decoder whose logits "
            "are head(norm(state)), without soft cap; set kl=0 and tv=0."
        )
    return copy.deepcopy(norm).requires_grad_(False)
