"""`NGramProposer`: drafts the continuation of the latest earlier match of the row's last tokens."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Int
from torch import Tensor

from torch_dflash.checks import is_count
from torch_dflash.ops.windows import read_rows, write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.base import Proposer
from torch_dflash.proposers.trees.nodes import Nodes
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft

MOST = 255
LIKELY, LATER = (0.0, 0.25, 0.5, 0.7), 0.8
"""Probability that the target picks the token after a match of 0, 1, 2, 3 tokens, and each later token."""


@register_state
@dataclass(frozen=True)
class NGramState:
    """The row's committed tokens ``history[b, :length[b]]``, without the anchor."""

    history: Int[Tensor, "B S"]
    length: Int[Tensor, " B"]

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Tokens taken in; equals the target's committed length between rounds."""
        return self.length


class Found(NamedTuple):
    """A lookup's result: the next ``tokens`` [B, N] and the length ``matched`` [B] of the match."""

    tokens: Int[Tensor, "B N"]
    matched: Int[Tensor, " B"]


class NGramProposer(Proposer):
    """Prompt-lookup decoding (A. Saxena, 2023): longest match up to ``max_ngram``, the latest among equals.

    Args:
        width: rows W of the draft, the anchor included.
        max_ngram: longest suffix to look up.

    Raises:
        ValueError: ``width`` is not in 2 .. `MOST`, or ``max_ngram`` not in 1 .. `MOST`.
    """

    name = "ngram"

    def __init__(self, width: int = 16, max_ngram: int = 3):
        super().__init__()
        for name, value, least in (("width", width, 2), ("max_ngram", max_ngram, 1)):
            if not is_count(value) or not least <= value <= MOST:
                raise ValueError(f"{name}={value!r}: must be an integer from {least} to {MOST}.")
        self.width = width
        self.max_ngram = max_ngram

    @property
    def key(self) -> tuple:
        """Equal for proposers that may share engines."""
        return type(self), self.width, self.max_ngram

    def start(self, plan: DecodePlan, device) -> NGramState:
        return NGramState(
            torch.zeros(plan.batch_size, plan.slots, dtype=torch.int32, device=device),
            torch.zeros(plan.batch_size, dtype=torch.int32, device=device),
        )

    def observe(self, pstate, features, ids, next_ids, count) -> NGramState:
        history = write_rows(pstate.history, ids, pstate.length, dim=1, count=count)
        return NGramState(history, pstate.length + count)

    def earliest(self, pstate, length) -> int:
        return 0

    def snapshot(self, pstate) -> tuple:
        return ()

    def rewind(self, pstate, kept, snapshot=None) -> NGramState:
        return NGramState(pstate.history, kept.clone())

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, NGramState]:
        found, pstate = self.look_up(pstate, anchor, length)
        valid = torch.where(found.matched > 0, self.width - 1, 0)
        return Draft(found.tokens, valid.to(torch.int32)), pstate

    def nodes(self, pstate, anchor, length, embed, head, request) -> tuple[Nodes, NGramState]:
        found, pstate = self.look_up(pstate, anchor, length)
        first = torch.tensor(LIKELY, device=length.device).log()
        first = first.gather(0, found.matched.clamp(max=len(LIKELY) - 1).long())[:, None]
        tokens = found.tokens[:, : request.rows - 1]
        node = torch.arange(tokens.shape[1], device=length.device, dtype=torch.int32)
        return Nodes(tokens, (node - 1).expand(tokens.shape), first + node * math.log(LATER)), pstate

    def look_up(
        self, pstate: NGramState, anchor: Int[Tensor, " B"], length: Int[Tensor, " B"]
    ) -> tuple[Found, NGramState]:
        """The tokens after the best match of the text up to ``anchor`` at ``length``."""
        # The anchor is committed, so it ends the suffix; the slot it gets is rewritten by `observe`.
        history = write_rows(pstate.history, anchor[:, None], length, dim=1)
        slot = torch.arange(history.shape[1], device=length.device, dtype=torch.int32)
        matched = torch.zeros_like(history)  # length of the suffix match that ends at each slot
        running = torch.ones_like(history, dtype=torch.bool)
        for back in range(self.max_ngram):
            suffix = read_rows(history, (length - back).clamp(min=0), 1)
            shifted = torch.roll(history, back, dims=1)
            running = running & (shifted == suffix) & (slot >= back) & (length >= back)[:, None]
            matched = matched + running.to(torch.int32)
        earlier = slot < length[:, None]  # the suffix itself is no match, and nothing follows it
        # Longest first, latest among equals.
        score = torch.where(earlier & (matched > 0), matched * history.shape[1] + slot, -1)
        best = torch.argmax(score, dim=1).to(torch.int32)
        longest = matched.gather(1, best[:, None].long())[:, 0]
        found = score.amax(dim=1) >= 0
        # Text that follows itself at distance p < N is taken to go on repeating with period p.
        period = (length - best).clamp(min=1)[:, None]
        ahead = torch.arange(self.width - 1, device=length.device, dtype=torch.int32)
        tokens = history.gather(1, ((best + 1)[:, None] + ahead % period).long())
        return Found(tokens, torch.where(found, longest, 0)), NGramState(history, pstate.length)
