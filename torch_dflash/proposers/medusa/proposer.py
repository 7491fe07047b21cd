"""`MedusaProposer`: drafts by Medusa's heads, as a chain or as nodes of a tree."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.checks import check_dtype
from torch_dflash.ops.windows import take_row
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.base import Proposer
from torch_dflash.proposers.dflash.vocabulary import noise_of
from torch_dflash.proposers.medusa.model import MedusaDraftModel
from torch_dflash.proposers.trees.nodes import Nodes, beam, children
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft, DraftRequest
from torch_dflash.targets.skeleton import build_skeleton


@register_state
@dataclass(frozen=True)
class MedusaState:
    """The feature of the last token taken in, the one before the anchor."""

    last: Float[Tensor, "B H"]
    length: Int[Tensor, " B"]

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Tokens taken in; equals the target's committed length between rounds."""
        return self.length


class MedusaProposer(Proposer):
    """Drafts with the heads of a `MedusaDraftModel` skeleton.

    Args:
        drafter: the live drafter; only its class and a copy of its config are used.
        width: rows of the draft, the anchor included; unset: one for every head, and the anchor's.

    Raises:
        ValueError: ``width`` asks for more heads than there are.
    """

    name = "medusa"

    def __init__(self, drafter: MedusaDraftModel, width: int | None = None):
        super().__init__()
        heads = drafter.config.medusa_num_heads
        if width is not None and width > heads + 1:
            raise ValueError(f"block_size={width}: the drafter has {heads} heads; set at most {heads + 1}.")
        self.drafter: Any = build_skeleton(drafter)
        self.taps = tuple(drafter.config.target_layer_ids)
        self.width = heads + 1 if width is None else width

    def start(self, plan: DecodePlan, device) -> MedusaState:
        size, dtype = (plan.batch_size, self.drafter.config.hidden_size), self.drafter.norm.weight.dtype
        zeros = torch.zeros(plan.batch_size, dtype=torch.int32, device=device)
        return MedusaState(torch.zeros(size, dtype=dtype, device=device), zeros)

    def earliest(self, pstate, length) -> int:
        return 0

    def snapshot(self, pstate) -> tuple:
        return ()

    def rewind(self, pstate, kept, snapshot=None) -> MedusaState:
        """The row's last feature comes with its next tokens, which are read before any draft."""
        return replace(pstate, length=kept.clone())

    def observe(self, pstate, features: Any, ids, next_ids, count) -> MedusaState:
        last = take_row(features, (count - 1).clamp(min=0))[:, 0].to(pstate.last.dtype)
        return MedusaState(torch.where((count > 0)[:, None], last, pstate.last), pstate.length + count)

    def skip(self, pstate, anchor, length, embed, head) -> MedusaState:
        return pstate

    def idle(self, pstate, anchor, length, embed, head) -> MedusaState:
        return pstate

    def draft(self, pstate, anchor, length, embed, head, request) -> tuple[Draft, MedusaState]:
        return self.propose(pstate, anchor, length, embed, head, request)

    def propose(
        self, pstate, anchor, length, embed, head, request: DraftRequest | None = None
    ) -> tuple[Draft, MedusaState]:
        noise = None if request is None else noise_of(length, request)
        tokens = self.drafter.choose(self._states(pstate), anchor, head, noise)
        return Draft(tokens, torch.full_like(length, self.width - 1)), pstate

    def nodes(self, pstate, anchor, length, embed, head, request) -> tuple[Nodes, MedusaState]:
        states, noise = self._states(pstate), noise_of(length, request)
        following = self.drafter.branches(states, head, noise, children(request.rows))
        return beam(following, anchor, self.width - 1, request.rows), pstate

    def _states(self, pstate: MedusaState) -> Float[Tensor, "B N H"]:
        check_dtype("drafter", pstate.last.dtype, self.drafter.norm.weight.dtype)
        return self.drafter.states(pstate.last, self.width - 1)
