"""Grouped dynamic convolution over a block's rows and the rows just before each."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn


class DynamicConvolution(nn.Module):
    """A causal convolution before a sublayer and one after; the sublayer's input gives both kernels.

    A kernel is a learned part of each channel plus a dynamic part of each group of channels. Rows before the
    block count as zeros.

    Args:
        hidden: channels. taps: rows seen. group: channels that share a dynamic kernel.

    Source: dflash 0.1.0, ``GroupedDynamicCausalConv``.
    """

    def __init__(self, hidden: int, taps: int, group: int):
        super().__init__()
        self.taps, self.groups = taps, hidden // group
        self.base_kernel = nn.Parameter(torch.empty(2, taps, hidden))  # before, after
        self.kernel_projection = nn.Linear(hidden, 2 * taps * self.groups, bias=False)

    def begin_as_nothing(self) -> None:
        """Set weights that leave every row unchanged."""
        with torch.no_grad():
            self.base_kernel.zero_()
            self.base_kernel[:, 0] = 1
            self.kernel_projection.weight.zero_()

    def before(self, rows: Float[Tensor, "B W H"]) -> tuple[Float[Tensor, "B W H"], Tensor]:
        """(rows for the sublayer, the dynamic kernel [B, W, taps, groups] of `after`)."""
        kernels = self.kernel_projection(rows).unflatten(-1, (2, self.taps, self.groups))
        return convolve(rows, kernels[..., 0, :, :], self.base_kernel[0]), kernels[..., 1, :, :]

    def after(self, rows: Float[Tensor, "B W H"], kernel: Tensor) -> Float[Tensor, "B W H"]:
        """The sublayer's output, convolved."""
        return convolve(rows, kernel, self.base_kernel[1])


def convolve(rows: Float[Tensor, "B W H"], dynamic: Tensor, base: Tensor) -> Float[Tensor, "B W H"]:
    """The sum of each row and the rows before, by ``base`` [taps, H] and ``dynamic`` [B, W, taps, groups]."""
    taps, groups = dynamic.shape[2:]
    out = torch.zeros_like(rows)
    for back in range(taps):
        seen = F.pad(rows[:, : rows.shape[1] - back], (0, 0, back, 0))
        grouped = seen.unflatten(-1, (groups, -1)) * dynamic[:, :, back, :, None]
        out = out + base[back].to(rows.dtype) * seen + grouped.flatten(2)
    return out
