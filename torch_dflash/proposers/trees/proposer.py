"""`TreeProposer`: rounds that verify a tree of the best nodes of one or several proposers."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from torch_dflash.checks import is_count
from torch_dflash.plan import MOST_TREE_ROWS
from torch_dflash.proposers.base import Proposer
from torch_dflash.proposers.composed import Composed, Several, States
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.medusa.model import MedusaDraftModel
from torch_dflash.proposers.trees.nodes import best, in_preorder, join, known_nodes
from torch_dflash.state import Draft, DraftRequest, Sampling


class BestNodes(Several):
    """Drafts one tree of the best nodes of all parts; equal nodes count once.

    Args:
        inner, others: as in `Several`.
        rows: most rows of a verify pass, the anchor included; a narrower pass gets a smaller tree.
    """

    def __init__(self, inner: Proposer, others: tuple[Proposer, ...], rows: int):
        super().__init__(inner, others)
        self.name = " and ".join(part.name for part in self.parts) + " in a tree"
        self.width, self.depth = rows, min(rows - 1, max(part.deepest for part in self.parts))

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, States]:
        return self.draft(pstate, anchor, length, embed, head, DraftRequest(_greedy(anchor), self.width))

    def draft(self, pstate, anchor, length, embed, head, request) -> tuple[Draft, States]:
        most, states, tree = request.rows - 1, [], None
        for part, state in zip(self.parts, pstate.parts, strict=True):
            found = part.nodes(state, anchor, length, embed, head, request)
            nodes, state = known_nodes(part, found, len(anchor))
            nodes = best(nodes, most)
            tree = nodes if tree is None else best(join(tree, nodes, self.deepest), most)
            states.append(state)
        assert tree is not None
        return in_preorder(tree, self.deepest), States(tuple(states))


def _greedy(anchor: Tensor) -> Sampling:
    floats, ints = torch.zeros_like(anchor, dtype=torch.float32), torch.zeros_like(anchor, dtype=torch.int32)
    return Sampling(temperature=floats, top_k=ints, top_p=floats + 1, min_p=floats, seed=ints)


class TreeProposer(Composed):
    """A drafter's block as a tree: pass ``td.TreeProposer(drafter, rows=16)`` as ``drafter``.

    A round verifies the drafter's likeliest paths through the block, instead of one path. A sampled row's
    paths are scored with its noise (`docs/proposers.md`).

    Args:
        drafter: a `DFlashDraftModel`, v1, DFlash2 or DSpark, or a `MedusaDraftModel`.
        rows: of the verify pass, the anchor included, from 2 to 64.

    Raises:
        TypeError: ``drafter`` is no such model. ValueError: ``rows`` is out of range.
    """

    def __init__(self, drafter: Any, rows: int = 16):
        if not isinstance(drafter, DFlashDraftModel | MedusaDraftModel):
            fix = "pass rows to td.Union" if isinstance(drafter, Composed) else "pass one of td.load_drafter"
            raise TypeError(f"drafter={type(drafter).__name__}: a tree is made of a drafter's block; {fix}.")
        check_tree_rows(rows)
        super().__init__(drafter, BestNodes, (), rows)


def check_tree_rows(rows: Any) -> None:
    """Raise ``ValueError`` unless a tree may have ``rows`` rows."""
    if not is_count(rows) or not 2 <= rows <= MOST_TREE_ROWS:
        raise ValueError(f"rows={rows!r}: must be an integer from 2 to {MOST_TREE_ROWS}, with the anchor.")
