"""`PlainProposer`: no drafts, so a round is one step of autoregressive decoding."""

from __future__ import annotations

from torch_dflash.proposers.base import Proposer
from torch_dflash.state import Draft


class PlainProposer(Proposer):
    """Proposes nothing (W = 1)."""

    name = "plain"
    width = 1

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, tuple]:
        return Draft(tokens=anchor[:, None][:, :0], valid=length * 0), pstate
