"""Trees of drafts as rows of a pass: the anchor is row 0, the nodes follow in depth-first preorder."""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from torch_dflash.ops.windows import positions


class Tree(NamedTuple):
    """A tree of M rows: row j is row i or one of its ancestors iff ``j <= i < end[j]``.

    ``depth`` is a row's distance from the anchor: its position is the anchor's plus its depth. The ``valid``
    [B] rows after the anchor are real nodes; each later row is a child of the anchor.
    """

    depth: Int[Tensor, "B M"]
    end: Int[Tensor, "B M"]
    valid: Int[Tensor, " B"]

    def seen(self) -> Bool[Tensor, "B M M"]:
        """Whether row i (second axis) sees row j (third): itself and its ancestors."""
        row = torch.arange(self.end.shape[1], device=self.end.device, dtype=self.end.dtype)
        return (row <= row[:, None]) & (row[:, None] < self.end[:, None])

    def before(self) -> Bool[Tensor, "B M M"]:
        """Whether row j (third axis) is the parent of row i (second); the anchor has none."""
        return self.seen() & (self.depth[:, None] == self.depth[..., None] - 1)

    def cut(self, rows: int) -> Tree:
        """The first ``rows`` rows alone."""
        return Tree(self.depth[:, :rows], self.end[:, :rows], self.valid)


def read_tree(parent: Int[Tensor, "B N"], valid: Int[Tensor, " B"], deepest: int) -> Tree:
    """The tree of N nodes, ``valid`` [B] of them real; ``parent`` is a node's number, -1 the anchor.

    A tree ends before its first node whose parent is not on the path of the previous node, or that is deeper
    than ``deepest``: a device cannot refuse an order that is no preorder.
    """
    count = parent.shape[1]
    node = torch.arange(count, device=parent.device, dtype=torch.int32)
    row = torch.arange(count + 1, device=parent.device, dtype=torch.int32)
    legal = (parent >= -1) & (parent < node)
    above = torch.where(legal, parent.to(torch.int32) + 1, 0)
    above = torch.cat([torch.zeros_like(above[:, :1]), above], dim=1)  # the anchor's is itself
    seen = lines(above, deepest)
    depth = seen.sum(dim=-1, dtype=torch.int32) - 1
    on_path = (seen[:, :-1] & (row == above[:, 1:, None])).any(dim=-1)
    good = legal & on_path & (depth[:, 1:] <= deepest) & (node < valid[:, None])
    valid = torch.cumprod(good.to(torch.int32), dim=1).sum(dim=1, dtype=torch.int32)
    real = row <= valid[:, None]
    last = torch.where(seen & real[..., None], row[:, None] + 1, 0).amax(dim=1)
    end = torch.where(row == 0, count + 1, torch.where(real, last, row + 1))
    return Tree(torch.where(real, depth, 1), end, valid)


def lines(above: Int[Tensor, "B M"], deepest: int) -> Bool[Tensor, "B M M"]:
    """Whether row i (second axis) reaches row j (third) in at most ``deepest`` steps to ``above``.

    ``above`` is a row's number; -1: none.
    """
    row = torch.arange(above.shape[1], device=above.device, dtype=torch.int32)
    reachable = ((row == above[..., None]) | (row == row[:, None])).to(torch.float32)
    for _ in range(deepest.bit_length()):  # each product doubles the steps
        reachable = (reachable @ reachable > 0).to(torch.float32)
    return reachable > 0


def rows_at(start: Int[Tensor, " B"], count: int, tree: Tree | None) -> Int[Tensor, "B count"]:
    """Positions of ``count`` rows from ``start[b]`` on: in order or, in a tree, by depth."""
    return positions(start, count) if tree is None else start[:, None] + tree.depth[:, :count]


def take_rows(rows: Tensor, path: Int[Tensor, "B path"], dim: int = 1) -> Tensor:
    """The rows ``path`` [B, path] of each sequence, along ``dim``."""
    shape = [1] * rows.ndim
    shape[0], shape[dim] = path.shape
    size = [*rows.shape]
    size[dim] = path.shape[1]
    return rows.gather(dim, path.long().view(shape).expand(size))
