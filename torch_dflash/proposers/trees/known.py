"""Checks a proposer's `Nodes`, to name a mistake before it becomes an index error."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_dflash.accept import drafted_by
from torch_dflash.proposers.trees.nodes import Nodes

INTEGERS = (torch.int32, torch.int64)


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
        if not right or (value.dtype not in INTEGERS if field != "score" else not value.is_floating_point()):
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
