"""No drafting: the round becomes one-token autoregressive decoding, the baseline of every comparison."""

from __future__ import annotations

from torch import nn

from torch_dflash.plan import DecodePlan
from torch_dflash.state import Draft


class PlainProposer(nn.Module):
    """Proposes nothing (W = 1)."""

    name = "plain"
    taps: tuple[int, ...] = ()
    width = 1

    def start(self, plan: DecodePlan, device) -> tuple:
        return ()

    def observe(self, pstate, features, ids, next_ids, count) -> tuple:
        return pstate

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, tuple]:
        return Draft(tokens=anchor[:, None][:, :0], valid=length * 0), pstate
