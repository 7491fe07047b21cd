"""The one interface every drafting method meets."""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from torch_dflash.plan import DecodePlan
from torch_dflash.state import Draft


@runtime_checkable
class Proposer(Protocol):
    """Drafts N tokens a round. Pure: all it keeps is in ``pstate``, which the loop carries and never reads.

    Implementations are ``nn.Module`` so that their weights are bound with the target's in one call.

    A state that counts what it has taken in shows it as ``committed`` [B]; eager rounds assert that it
    equals the target's committed length.

    One that keeps no weights may have a hashable ``key``: objects of equal keys then share engines.

    Attributes:
        name: of the method; saved states carry it, so it must not change.
        taps: target layers whose outputs it wants (0-based block indices), () for none.
        width: rows W of its draft, the anchor included.
    """

    name: str
    taps: tuple[int, ...]
    width: int

    def start(self, plan: DecodePlan, device) -> Any:
        """Empty state for ``plan``."""
        ...

    def observe(
        self, pstate: Any, features: Tensor | None, ids: Tensor, next_ids: Tensor, count: Tensor
    ) -> Any:
        """Take in the first ``count`` [B] of R newly committed rows.

        ``ids`` [B, R] are the tokens the features [B, R, n*H] belong to (the anchor and what was accepted),
        ``next_ids`` [B, R] the tokens after them (accepted and bonus; the bonus has no feature yet).
        """
        ...

    def propose(self, pstate: Any, anchor: Tensor, length: Tensor, embed, head) -> tuple[Draft, Any]:
        """Draft after ``anchor`` [B], which stands at position ``length`` [B].

        ``embed(ids)`` gives raw target embeddings, ``head(hidden)`` target logits.
        """
        ...
