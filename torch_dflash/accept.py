"""Acceptance: which drafted tokens a round keeps. Pure functions on integers."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from torch_dflash.ops.trees import Tree
from torch_dflash.plan import DecodePlan
from torch_dflash.state import Draft


def accept_chain(draft: Draft, target: Int[Tensor, "B M"]) -> Int[Tensor, " B"]:
    """Tokens that a round commits: the longest prefix of the chain that the target picks, and the bonus.

    ``target[b, i]`` is the target's pick (argmax, or its sample) after verify row i. Drafts are kept while
    they equal these picks, and the first pick that differs is the bonus token, so every committed token is
    the target's own: lossless for any proposal (arXiv 2602.06036 section 3; at temperature > 0
    this is exact rejection sampling of a point-mass proposal).
    """
    rows = target.shape[1]
    match = (draft.tokens[:, : rows - 1] == target[:, :-1]).to(torch.int32)
    step = torch.arange(rows - 1, device=target.device, dtype=torch.int32)
    match = match * (step < draft.valid[:, None]).to(torch.int32)
    return torch.cumprod(match, dim=1).sum(dim=1, dtype=torch.int32) + 1


def accept_tree(
    tokens: Int[Tensor, "B N"], tree: Tree, target: Int[Tensor, "B M"], deepest: int
) -> tuple[Int[Tensor, "B path"], Int[Tensor, " B"]]:
    """(Rows of the deepest path that the target picks, their number: the tokens that a round commits).

    A walk from the anchor: from each row on to the child that equals the target's pick; the first pick
    without a child is the bonus. Each committed token is the target's own pick, whatever the tree.
    ``tokens`` are those of rows 1 to N; a path has at most ``deepest`` + 1 rows and repeats its last row.
    """
    row = torch.arange(target.shape[1], device=target.device, dtype=torch.int32)
    seen, depth = tree.seen(), tree.depth
    wanted = torch.where(tree.before(), target[:, None], 0).sum(dim=-1, dtype=torch.int32)[:, 1:]
    equal = (tokens == wanted) & (row[1:] <= tree.valid[:, None])
    equal = torch.cat([torch.ones_like(equal[:, :1]), equal], dim=1)
    picked = (equal[:, None] | ~seen).all(dim=-1)
    # The deepest; the first of two, which only a draft that is no tree has.
    best = torch.where(picked, depth * len(row) + row.flip(0), -1).argmax(dim=1)[:, None]
    mine = (seen & (row == best)[..., None]).any(dim=1)
    step = torch.arange(min(deepest, len(row) - 1) + 1, device=target.device, dtype=torch.int32)
    here = mine[:, None] & (depth[:, None] == step[:, None])
    path = torch.where(here, row, 0).sum(dim=-1, dtype=torch.int32)
    count = mine.sum(dim=1, dtype=torch.int32)
    return torch.where(step < count[:, None], path, best.to(torch.int32)), count


def trim_at_stop(
    tokens: Int[Tensor, "B M"], count: Int[Tensor, " B"], stop_ids: Int[Tensor, "B E"]
) -> tuple[Int[Tensor, " B"], Bool[Tensor, " B"]]:
    """Cut the first ``count`` of ``tokens`` after the first stop id: (new count, whether there was one)."""
    at = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int32)
    is_stop = (tokens[:, :, None] == stop_ids[:, None, :]).any(dim=2) & (at < count[:, None])
    stopped = is_stop.any(dim=1)
    first = torch.where(is_stop, at, tokens.shape[1]).amin(dim=1).to(torch.int32)
    return torch.where(stopped, first + 1, count), stopped


def drafted_by(
    proposer: Any, proposed: Any, method: str = "propose", first: str = "Draft(tokens, valid)"
) -> tuple[Any, Any]:
    """Unpack the result of a proposer's ``method``: (the ``first`` value, such as a draft; its state).

    Raises:
        TypeError: not two values.
    """
    if isinstance(proposed, tuple | list) and len(proposed) == 2:
        return proposed[0], proposed[1]
    count = f" of {len(proposed)}" if isinstance(proposed, tuple | list) else ""
    raise TypeError(
        f"{type(proposer).__name__}.{method}() returned {type(proposed).__name__}{count}: return two values, "
        f"a {first.partition('(')[0]} and the proposer's state (return torch_dflash.{first}, pstate)."
    )


def known_draft(draft: Any, plan: DecodePlan, vocab_size: int) -> Draft:
    """The draft up to its first id outside the vocabulary; later tokens are arbitrary.

    Raises:
        TypeError, ValueError: no draft of integers for every row, or a tree from a proposer without depth.
    """
    if not isinstance(draft, Draft):
        raise TypeError(f"propose() drafted {type(draft).__name__}: return a Draft and the proposer's state.")
    wanted = {"tokens": (plan.batch_size, plan.nodes), "valid": (plan.batch_size,)}
    if draft.parent is not None:
        if plan.depth is None:
            raise ValueError(
                "Draft.parent is set: a tree of drafts, and the proposer has no depth; set how many nodes "
                "its deepest path has (depth = 7), or propose a chain and leave parent None."
            )
        narrower = getattr(draft.tokens, "shape", ())[1:] or (plan.nodes,)  # in a narrower round
        wanted["tokens"] = wanted["parent"] = (plan.batch_size, min(plan.nodes, *narrower))
    for name, shape in wanted.items():
        found = getattr(draft, name)
        whole = isinstance(found, Tensor) and found.dtype in (torch.int32, torch.int64)
        if not whole or tuple(found.shape) != shape:
            kind = f"{getattr(found, 'dtype', type(found).__name__)} {list(getattr(found, 'shape', []))}"
            raise ValueError(f"Draft.{name} is {kind}: it must be a tensor of int32 {list(shape)}.")
    tokens = draft.tokens.clamp(0, vocab_size - 1).to(torch.int32)
    known = torch.cumprod((tokens == draft.tokens).to(torch.int32), dim=1).sum(dim=1, dtype=torch.int32)
    parent = draft.parent
    if parent is None and plan.depth is not None:  # this round's is a chain
        parent = torch.arange(-1, plan.nodes - 1, device=tokens.device).expand(tokens.shape)
    return Draft(tokens, torch.minimum(draft.valid.to(torch.int32), known), parent)
