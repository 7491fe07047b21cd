"""A depthwise causal convolution over few rows, from the rows that stand before them."""

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
    """The convolution of M rows behind ``tail``, in the weight's type; sums in float32 at least.

    Args:
        tail: the inputs of the ``taps - 1`` positions before the first row.
        tree: of rows that are a tree's, whose inputs are those of each row's own path.
    """
    height, taps = rows.shape[2], weight.shape[1]
    wide = at_least_float32(weight.dtype)
    # Channels last: layers hand over rows that lie so, and turn the outputs round again.
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
    """The inputs before the next position, once the first ``count`` rows (of ``path``) are accepted."""
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
    # In preorder a row's parent is the last of those before it on its path; the anchor's is the tail's end.
    parent = torch.where(seen & (row < row[:, None]), row + before, before - 1).amax(dim=2)
    older = (torch.arange(before, device=seen.device) - 1).expand(len(seen), -1)
    above = torch.cat([older, parent], dim=1)
    at = (row + before).expand(len(seen), -1)
    found = []
    for _ in range(taps):
        found.append(both.gather(1, at[:, :, None].expand(-1, -1, both.shape[2])))
        at = above.gather(1, at).clamp(min=0)
    return found[::-1]
