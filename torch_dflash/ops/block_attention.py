"""Attention of a drafted block: over the cached context, and over the block itself."""

from __future__ import annotations

from typing import NamedTuple

from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.attention import AttentionInputs, KeyValue, grouped_attention, visible, with_rows
from torch_dflash.ops.lowerable import lowerable
from torch_dflash.ops.windows import last_used, reach


class Past(NamedTuple):
    """Cached keys and values in any order; ``position`` is that of each slot, -1 for an empty one."""

    key: Float[Tensor, "B G S D"]
    value: Float[Tensor, "B G S D"]
    position: Int[Tensor, "B S"]

    def used(self) -> Past:
        """The slots up to the last in use; all where the host would have to wait for that number."""
        end = last_used(self.position, self.position.shape[1], self._end)
        return Past(self.key[:, :, :end], self.value[:, :, :end], self.position[:, :end])

    def _end(self) -> int:
        held = (self.position >= 0).any(dim=0).nonzero()
        return int(held[-1]) + 1 if len(held) else 0


@lowerable
def block_attention(inputs: AttentionInputs, past: Past, causal: bool) -> Float[Tensor, "B W Q D"]:
    """Attend from a block's W rows to the context before them and to each other.

    On a TPU `jax_bridge.kernels.block_attention` streams the context past the block's rows, so that no
    score goes through HBM.

    Args:
        inputs: of the block; ``window`` reaches both ways unless ``causal``. No soft cap, except with a tree.
        past: the context, of positions below ``inputs.start``. With a tree, slot p holds position p.
        causal: whether rows see no later row of the block; rows of a tree see their own paths.
    """
    if inputs.tree is not None:
        slots = past.key.shape[2] + inputs.key.shape[2]
        part = with_rows(inputs, past.key, past.value, reach(inputs.start, inputs.key.shape[2], slots))
        return grouped_attention(inputs.query, [part], inputs.scale, inputs.sinks, inputs.softcap)
    past = past.used()
    at, window = inputs.at, inputs.window
    seen = visible(at, past.position, window, causal) & (past.position >= 0)[:, None, None]
    inside = visible(at, at, window, causal)
    parts = [KeyValue(past.key, past.value, seen), KeyValue(inputs.key, inputs.value, inside)]
    return grouped_attention(inputs.query, parts, inputs.scale, inputs.sinks, inputs.softcap)
