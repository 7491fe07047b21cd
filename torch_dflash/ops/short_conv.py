"""A depthwise causal convolution over few rows and the rows before them."""

from __future__ import annotations

from functools import reduce

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.recurrence import at_least_float32
from torch_dflash.ops.trees import Tree, take_rows


def short_conv(
    tail: Float[Tensor, "B C before"],
    rows: Float[Tensor, "B C M"],
    weight: Float[Tensor, "C taps"],
    bias: Float[Tensor, " C"] | None,
    tree: Tree | None = None,
) -> Float[Tensor, "B C M"]:
    """The convolution of M rows after ``tail``, in the weight's dtype; sums are float32 or float64.

    Args:
        tail: the inputs of the ``taps - 1`` positions before the first row.
        tree: the tree of the rows; the inputs of a row are those of its path.
    """
    height, taps = rows.shape[2], weight.shape[1]
    wide = at_least_float32(weight.dtype)
    # Channels last: the layout of the layers' rows; they transpose the outputs back.
    both = torch.cat([tail.mT, rows.mT], dim=1).to(weight.dtype)
    inputs = _on_chain(both, taps, height) if tree is None else _on_paths(both, tree, taps)
    parts = (rows.to(wide) * weight[:, tap].to(wide) for tap, rows in enumerate(inputs))
    out = reduce(torch.add, parts)
    out = out if bias is None else out + bias.to(wide)
    return out.to(weight.dtype).mT


def next_tail(
    tail: Float[Tensor, "B C before"],
    rows: Float[Tensor, "B C M"],
    count: Int[Tensor, " B"],
    path: Int[Tensor, "B path"] | None = None,
) -> Float[Tensor, "B C before"]:
    """The inputs before the next position, after the first ``count`` rows (of ``path``) are accepted."""
    rows = rows if path is None else take_rows(rows, path, dim=2)
    before = tail.shape[2]
    at = (count[:, None].long() + torch.arange(before, device=count.device))[:, None]
    place = at.expand_as(tail)
    older = tail.gather(2, place.clamp(max=before - 1))
    return torch.where(at < before, older, rows.gather(2, (place - before).clamp(min=0)))


def _on_chain(both: Tensor, taps: int, height: int) -> list[Tensor]:
    return [both[:, tap : tap + height] for tap in range(taps)]


def _on_paths(both: Tensor, tree: Tree, taps: int) -> list[Tensor]:
    """The inputs ``taps - 1``, ..., 0 steps up each row's path."""
    before, seen = taps - 1, tree.seen()
    row = torch.arange(seen.shape[1], device=seen.device)
    # In preorder a row's parent is the last row before it on its path; the anchor's is the end of the tail.
    parent = torch.where(seen & (row < row[:, None]), row + before, before - 1).amax(dim=2)
    older = (torch.arange(before, device=seen.device) - 1).expand(len(seen), -1)
    above = torch.cat([older, parent], dim=1)
    at = (row + before).expand(len(seen), -1)
    found = []
    for _ in range(taps):
        found.append(both.gather(1, at[:, :, None].expand(-1, -1, both.shape[2])))
        at = above.gather(1, at).clamp(min=0)
    return found[::-1]
