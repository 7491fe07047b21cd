"""`Nodes`: scored drafts, joined to the best tree of a number of rows.

Source: DDTree (arXiv 2604.12989), which takes the best nodes over the marginals of a block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.accept import drafted_by
from torch_dflash.ops.trees import lines, read_tree
from torch_dflash.state import Draft

UNSCORED = 0.6
"""Probability that the target picks an unscored node after its parent."""


class Nodes(NamedTuple):
    """C candidates for rows of a tree; the proposer chooses C, the same in every round.

    Attributes:
        tokens: [B, C] int32, the drafted ids.
        parent: [B, C] int32, the number of the node before, lower than the node's own, or -1 for the anchor.
        score: [B, C] float32, the log-probability that the target picks the whole path to the node: the sum
            along the path, so no node scores higher than its parent. -inf or NaN: do not draft the node.
    """

    tokens: Int[Tensor, "B C"]
    parent: Int[Tensor, "B C"]
    score: Float[Tensor, "B C"]


def unscored(draft: Draft, deepest: int) -> Nodes:
    """The nodes of a chain or tree whose proposer gives no score."""
    count = draft.tokens.shape[1]
    node = torch.arange(count, device=draft.tokens.device, dtype=torch.int32)
    if draft.parent is None:
        parent, depth, valid = (node - 1).expand(draft.tokens.shape), node + 1, draft.valid
    else:
        tree = read_tree(draft.parent, draft.valid, deepest)
        parent, depth, valid = draft.parent.to(torch.int32), tree.depth[:, 1:], tree.valid
    real = node < valid.clamp(max=deepest if draft.parent is None else count)[:, None]
    score = torch.where(real, depth * math.log(UNSCORED), -torch.inf)
    return Nodes(draft.tokens.to(torch.int32), torch.where(real, parent, -1), score.to(torch.float32))


def best(nodes: Nodes, most: int) -> Nodes:
    """The ``most`` nodes of the highest scores, in falling order; a node's parent is among them."""
    score = torch.where(nodes.score > -torch.inf, nodes.score, -torch.inf)  # also in place of NaN
    at = torch.arange(score.shape[1], device=score.device, dtype=torch.int32)
    # Of equal scores the earlier node comes first: a parent has a lower number than its children.
    level = (score[:, None] == score[..., None]) & (at < at[:, None])
    rank = ((score[:, None] > score[..., None]) | level).sum(dim=-1, dtype=torch.int32)
    wanted = torch.arange(min(most, len(at)), device=score.device, dtype=torch.int32)
    source = torch.where(rank[:, None] == wanted[:, None], at, 0).sum(dim=-1)
    parent = nodes.parent.gather(1, source)
    # Clamped: in programs, nodes that break the rules of `Nodes` must not index outside.
    above = rank.gather(1, parent.clamp(0, len(at) - 1).long()).clamp(max=len(wanted) - 1)
    parent = torch.where(parent < 0, -1, above)
    return Nodes(nodes.tokens.gather(1, source), parent, score.gather(1, source))


def join(first: Nodes, second: Nodes, deepest: int) -> Nodes:
    """The nodes of both; a node in both counts once, with its higher score.

    Two nodes are equal if the same tokens lead to them from the anchor.
    """
    mine, theirs = paths(first, deepest), paths(second, deepest)
    drafted = first.score > -torch.inf  # padding may have the tokens of a node of ``second``
    same = (theirs[:, :, None] == mine[:, None]).all(dim=-1) & drafted[:, None]
    known, count = same.any(dim=-1), first.tokens.shape[1]
    own = torch.arange(second.tokens.shape[1], device=known.device, dtype=torch.int32) + count
    place = torch.where(known, same.to(torch.int32).argmax(dim=-1).to(torch.int32), own)
    above = place.gather(1, second.parent.clamp(min=0).long())
    higher = torch.where(same, second.score[..., None], -torch.inf).amax(dim=1)
    return Nodes(
        torch.cat([first.tokens, second.tokens], dim=1),
        torch.cat([first.parent, torch.where(second.parent < 0, -1, above)], dim=1),
        torch.cat([torch.maximum(first.score, higher), torch.where(known, -torch.inf, second.score)], dim=1),
    )


def paths(nodes: Nodes, deepest: int) -> Int[Tensor, "B C deepest"]:
    """The tokens from the anchor to each node, -1 behind the node."""
    line: Bool[Tensor, "B C C"] = lines(nodes.parent, deepest)
    step = torch.arange(1, deepest + 1, device=line.device, dtype=torch.int32)
    depth = line.sum(dim=-1, dtype=torch.int32)
    here = line[:, :, None] & (depth[:, None] == step[:, None])[:, None]  # [B, C, deepest, C]
    tokens = torch.where(here, nodes.tokens[:, None, None], 0).sum(dim=-1, dtype=torch.int32)
    return torch.where(step <= depth[..., None], tokens, -1)


def in_preorder(nodes: Nodes, deepest: int) -> Draft:
    """The draft of nodes in the order of `best`; the better of two siblings comes first."""
    at = torch.arange(nodes.tokens.shape[1], device=nodes.tokens.device, dtype=torch.int32)
    valid = (nodes.score > -torch.inf).sum(dim=1, dtype=torch.int32)
    parent = torch.where(at < valid[:, None], nodes.parent, -1)
    line = lines(parent, deepest)
    size = line.sum(dim=1, dtype=torch.int32)
    earlier = (parent[:, None] == parent[..., None]) & (at < at[:, None])
    behind = torch.where(earlier, size[:, None], 0).sum(dim=-1, dtype=torch.int32) + 1  # the node before it
    place = torch.where(line, behind[:, None], 0).sum(dim=-1, dtype=torch.int32) - 1
    above = torch.where(parent < 0, -1, place.gather(1, parent.clamp(min=0).long()))
    here = place[:, None] == at[:, None]
    tokens, above = (
        torch.where(here, rows[:, None], 0).sum(dim=-1, dtype=torch.int32) for rows in (nodes.tokens, above)
    )
    return Draft(tokens, valid, above)


Following = Callable[[int, Int[Tensor, "B P"]], tuple[Int[Tensor, "B P K"], Float[Tensor, "B P K"]]]
"""(position in the block, P tokens before it) -> K next tokens of each, and their log-probabilities.

The second axis may be 1 where the tokens before make no difference.
"""


def children(rows: int) -> int:
    """The number of tokens of a position from which a tree of ``rows`` rows chooses."""
    return min(16 if rows > 32 else 8, max(rows - 1, 1))


def beam(following: Following, anchor: Int[Tensor, " B"], levels: int, rows: int) -> Nodes:
    """Nodes of the likeliest paths of up to ``levels`` tokens after ``anchor``, for a tree of ``rows`` rows.

    Each level continues from half as many nodes as the tree has, from all in a small tree.
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


_INTEGERS = (torch.int32, torch.int64)


def known_nodes(proposer: Any, found: Any, batch: int) -> tuple[Nodes, Any]:
    """The nodes and the state in ``found``, the result of ``proposer.nodes``.

    Values are checked on a CPU alone, where reading them waits for nothing. Elsewhere nodes that break the
    rules of `Nodes` are drafted wrongly, which costs rounds and changes no text.

    Raises:
        TypeError, ValueError: not a pair, wrong shapes or types, or a broken rule of `Nodes`.
    """
    nodes, state = drafted_by(proposer, found, "nodes", "Nodes(tokens, parent, score)")
    name = f"{type(proposer).__name__}.nodes()"
    if not isinstance(nodes, Nodes):
        raise TypeError(f"{name} returned {type(nodes).__name__}: return td.Nodes(tokens, parent, score).")
    size = tuple(getattr(nodes.tokens, "shape", ()))[1:2] or ("C",)
    for field, value in nodes._asdict().items():
        right = isinstance(value, Tensor) and tuple(value.shape) == (batch, *size)
        if not right or (value.dtype not in _INTEGERS if field != "score" else not value.is_floating_point()):
            kind = f"{getattr(value, 'dtype', type(value).__name__)} {list(getattr(value, 'shape', []))}"
            wanted = "float32" if field == "score" else "int32"
            raise ValueError(f"{name}: {field} is {kind}: must be a tensor of {wanted} [{batch}, {size[0]}].")
    if nodes.tokens.device.type == "cpu":
        _check_values(name, nodes)
    return nodes, state


def _check_values(name: str, nodes: Nodes) -> None:
    node = torch.arange(nodes.parent.shape[1])
    odd = ((nodes.parent < -1) | (nodes.parent >= node)).nonzero()
    if len(odd):
        row, at = odd[0].tolist()
        raise ValueError(
            f"{name}: parent[{row}, {at}] is {int(nodes.parent[row, at])}: it must be -1, for the anchor, or "
            f"an earlier node's number (below {at})."
        )
    score = torch.where(nodes.score > -torch.inf, nodes.score, -torch.inf)
    above = torch.where(nodes.parent < 0, torch.inf, score.gather(1, nodes.parent.clamp(min=0).long()))
    odd = (score > above).nonzero()
    if len(odd):
        row, at = odd[0].tolist()
        raise ValueError(
            f"{name}: score[{row}, {at}] is {float(score[row, at]):g}, and that of its parent, node "
            f"{int(nodes.parent[row, at])}, is {float(above[row, at]):g}: no node may score higher than its "
            "parent; add up the log-probabilities along the path."
        )
