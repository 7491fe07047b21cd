"""A ring of K/V for a layer with a sliding window: constant memory, whatever the length."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.ops.windows import clear_rows, write_rows
from torch_dflash.plan import whole_tiles
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class RingLayer:
    """K/V of the last R positions: slot ``p % R`` holds position p until p + R overwrites it.

    Spare slots follow the R: rows past the end of the ring are written there, then moved to its beginning.
    ``position`` is that of each slot, -1 for an empty one.
    """

    key: Float[Tensor, "B G slots D"]
    value: Float[Tensor, "B G slots Dv"]
    position: Int[Tensor, "B R"]

    def write(
        self, key: Tensor, value: Tensor, start: Int[Tensor, " B"], count: Int[Tensor, " B"]
    ) -> RingLayer:
        """Put the first ``count`` [B] of [B, G, M, D] rows at positions from ``start`` [B]; consumes self."""
        size = self.position.shape[1]
        last = (start + count - 1)[:, None]
        slots = torch.arange(size, device=start.device, dtype=start.dtype)
        # The latest position up to the last one that falls into each slot.
        position = last - torch.remainder(last - slots, size)
        return RingLayer(
            self._put(self.key, key, start, count, position),
            self._put(self.value, value, start, count, position),
            position.clamp(min=-1),
        )

    def positions(self, length: Int[Tensor, " B"]) -> Int[Tensor, "B S"]:
        """The position in each slot, -1 for none."""
        return F.pad(self.position, (0, self.key.shape[2] - self.position.shape[1]), value=-1)

    def reset(self, rows: Bool[Tensor, " B"]) -> RingLayer:
        """Empty the rows marked."""
        position = torch.where(rows[:, None], -1, self.position)
        return RingLayer(clear_rows(self.key, rows), clear_rows(self.value, rows), position)

    def _put(self, buffer: Tensor, rows: Tensor, start: Tensor, count: Tensor, position: Tensor) -> Tensor:
        size = self.position.shape[1]
        spare, height = buffer.shape[2] - size, rows.shape[2]
        if height > min(spare, size):  # a prompt, maybe longer than the ring: slots take their latest rows
            row = position - start[:, None]
            index = row.clamp(0, height - 1).long()[:, None, :, None]
            fresh = rows.gather(2, index.expand(*rows.shape[:2], -1, rows.shape[3])).to(buffer.dtype)
            ring = torch.where((row >= 0)[:, None, :, None], fresh, buffer[:, :, :size])
            return torch.cat([ring, buffer[:, :, size:]], dim=2)
        slot = torch.remainder(start, size)
        buffer = write_rows(buffer, rows, slot, dim=2, count=count)
        over, spilled = (slot + count - size).clamp(min=0), buffer[:, :, size : size + height]
        return write_rows(buffer, spilled, torch.zeros_like(slot), dim=2, count=over)


def allocate_ring(
    heads: int, dim: int, batch_size: int, window: int, rows: int, dtype: torch.dtype, device
) -> RingLayer:
    """An empty ring of ``window + rows - 1`` slots, to which up to ``rows`` rows are written a round."""
    size = window + rows - 1
    shape = batch_size, heads, whole_tiles(size + rows), dim
    return RingLayer(
        key=torch.zeros(shape, dtype=dtype, device=device),
        value=torch.zeros(shape, dtype=dtype, device=device),
        position=torch.full((batch_size, size), -1, dtype=torch.int32, device=device),
    )
