"""A beam over the positions of a block: the likeliest paths through it, level by level."""

from __future__ import annotations

from collections.abc import Callable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.proposers.trees.nodes import Nodes

Following = Callable[[int, Int[Tensor, "B P"]], tuple[Int[Tensor, "B P K"], Float[Tensor, "B P K"]]]
"""(position in the block, P tokens before it) -> K tokens that may follow each, and their log-probabilities.

The second axis may be 1 where the tokens before make no difference.
"""


def children(rows: int) -> int:
    """How many tokens of a position a tree of so many rows chooses from."""
    return min(16 if rows > 32 else 8, max(rows - 1, 1))


def beam(following: Following, anchor: Int[Tensor, " B"], levels: int, rows: int) -> Nodes:
    """Nodes of the likeliest paths of up to ``levels`` tokens after ``anchor``, for a tree of ``rows`` rows.

    Each level goes on from half as many nodes as the tree has, from all of a small tree.
    """
    width = min(rows - 1, max(rows // 2, 8))
    score, before = torch.zeros_like(anchor, dtype=torch.float32)[:, None], anchor[:, None].to(torch.int32)
    number = torch.full_like(before, -1)
    found, total = [], 0
    for at in range(min(levels, rows - 1)):
        ids, logs = following(at, before)
        sums = (score[..., None] + logs.clamp(max=0)).flatten(1)
        score, chosen = sums.topk(min(width, sums.shape[1]))
        ids = ids.expand(*before.shape, ids.shape[-1]).flatten(1)
        before, parent = ids.gather(1, chosen), number.gather(1, chosen // logs.shape[-1])
        found.append(Nodes(before, parent, score))
        number = torch.arange(before.shape[1], device=anchor.device, dtype=torch.int32) + total
        number, total = number.expand(before.shape), total + before.shape[1]
    return Nodes(*(torch.cat(parts, dim=1) for parts in zip(*found, strict=True)))
