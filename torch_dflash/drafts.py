"""What a proposer hands back, held to what a round can verify."""

from __future__ import annotations

import torch
from torch import Tensor

from torch_dflash.state import DecodePlan, Draft


def known_chain(draft: Draft, plan: DecodePlan, vocab_size: int) -> Draft:
    """The draft as far as its ids have an embedding; in the place of those that have none stands some token.

    Raises:
        TypeError, ValueError: no draft of integers for every row, or a tree.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose() drafted {type(draft).__name__}: return a Draft and the proposer's state.")
    wanted = {"tokens": (plan.batch_size, plan.nodes), "valid": (plan.batch_size,)}
    for name, shape in wanted.items():
        found = getattr(draft, name)
        whole = isinstance(found, Tensor) and found.dtype in (torch.int32, torch.int64)
        if not whole or tuple(found.shape) != shape:
            kind = f"{getattr(found, 'dtype', type(found).__name__)} {list(getattr(found, 'shape', []))}"
            raise ValueError(f"Draft.{name} is {kind}: it must be a tensor of int32 {list(shape)}.")
    if draft.parent is not None:
        raise ValueError(
            "Draft.parent is set: a tree of drafts would be verified as if it were a chain; propose a chain "
            "and leave parent None."
        )
    tokens = draft.tokens.clamp(0, vocab_size - 1).to(torch.int32)
    known = torch.cumprod((tokens == draft.tokens).to(torch.int32), dim=1).sum(dim=1, dtype=torch.int32)
    return Draft(tokens, torch.minimum(draft.valid.to(torch.int32), known))
