"""`Student`: a drafter between the target's frozen embedding and head."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn

from torch_dflash.proposers.pair import check_pair, tables_of_ids
from torch_dflash.targets.final_norm import final_norm
from torch_dflash.train.features.tensorfiles import TargetFingerprint, weights_fingerprint
from torch_dflash.train.fit.blocks import AnchorBatch, block_targets, gather_rows, previous_tokens
from torch_dflash.train.fit.kinds import Kind, kind_of
from torch_dflash.train.fit.objective import Losses, LossVocabulary, block_losses
from torch_dflash.train.fit.options import Objective
from torch_dflash.train.fit.selection import Chain, Selection


class Student(nn.Module):
    """Losses of the drafter's blocks against the target's tokens; only the drafter is trained.

    Args:
        drafter: trained in place; of any `Kind`. target: gives embedding, head and, for losses against its
            distributions, the final norm.
        objective: the loss. width: rows W of a draft, the anchor included; unset: the drafter's.
        head_dtype: of the head's products ("bfloat16" for mixed precision); unset: the head's own.

    Raises:
        ValueError: the drafter has parts that a fit does not train, or does not fit the target; or the loss
            needs a part that the target lacks.
    """

    embedding: torch.Tensor
    head_weight: torch.Tensor
    head_bias: torch.Tensor | None

    def __init__(
        self,
        drafter: Any,
        target: Any,
        objective: Objective,
        width: int | None = None,
        head_dtype: torch.dtype | None = None,
    ):
        super().__init__()
        self.kind: Kind = kind_of(drafter.config)
        self.kind.check(drafter.config)
        check_pair(target, drafter)
        _check_tables(drafter.config, target)
        self.drafter = drafter
        self.objective = objective
        self.target = TargetFingerprint.of(target)
        self.start_weights = weights_fingerprint(drafter)  # now: a fit trains it in place
        self.width = self.kind.drafts(drafter.config) + 1 if width is None else width
        self.last_layer = target.config.get_text_config().num_hidden_layers - 1
        head = target.get_output_embeddings()
        weight, bias = head.weight.detach(), None if head.bias is None else head.bias.detach()
        # Buffers outside the state dict: moved with the module, never trained, never saved.
        self.register_buffer("embedding", target.get_input_embeddings().weight.detach(), persistent=False)
        self.register_buffer("head_weight", weight.to(head_dtype or weight.dtype), persistent=False)
        self.register_buffer("head_bias", bias, persistent=False)
        self.final_norm: Any = _frozen_norm(target) if objective.distils else None

    @property
    def trained(self) -> dict[str, nn.Parameter]:
        """The drafter's parameters that ask for a gradient, by its names."""
        named = self.drafter.named_parameters()
        return {name: weight for name, weight in named if weight.requires_grad}

    def forward(self, batch: AnchorBatch, vocabulary: LossVocabulary | None = None) -> Losses:
        """Sums over the batch; ``vocabulary`` unset: the loss runs over all ids."""
        hidden = self.kind.states(self.drafter, batch, self.embedding, self.width - 1)
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
        selector = getattr(drafter, "candidate_selector", None)
        if selector is None:
            return None
        return Selection(selector, previous_tokens(batch, self.width))

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


def check_gradients(student: Student) -> None:
    """Raise ``ValueError`` for a weight that the loss does not reach, by name; nothing is computed."""
    ghost = weightless(student, trained=True)
    named, rows = ghost.trained, student.width + 1
    hidden, taps = student.embedding.shape[1], len(student.drafter.config.target_layer_ids)

    def made(*shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, device="meta")

    features, last = (made(1, rows, width * hidden, dtype=torch.float32) for width in (taps, 1))
    with torch.enable_grad():
        loss = ghost(AnchorBatch(made(1, rows), made(1), features, made(1, 1), last)).loss
        gradients = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    for name, gradient in zip(named, gradients, strict=True):
        if gradient is None:
            raise ValueError(
                f"{name} of the drafter gets no gradient from the loss, so a fit would leave it as it is; "
                "train a drafter without this weight."
            )


def weightless(module: nn.Module, trained: bool = False) -> Any:
    """A copy of ``module`` on the meta device; ``trained``: autograd follows its parameters."""
    memo: dict[int, Any] = {id(buffer): buffer.to("meta") for buffer in module.buffers()}
    for weight in module.parameters():
        memo[id(weight)] = nn.Parameter(
            weight.detach().to("meta"), requires_grad=trained and weight.requires_grad
        )
    return copy.deepcopy(module, memo)
