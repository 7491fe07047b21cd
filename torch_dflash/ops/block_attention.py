"""Attention of a drafted block: over the cached context, and over the block itself."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor
from torch.overrides import handle_torch_function, has_torch_function

from torch_dflash.ops.attention import KeyValue, grouped_attention, visible


def block_attention(
    query: Float[Tensor, "B Q W D"],
    key: Float[Tensor, "B G W D"],
    value: Float[Tensor, "B G W D"],
    past_key: Float[Tensor, "B G S D"],
    past_value: Float[Tensor, "B G S D"],
    position: Int[Tensor, "B S"],
    start: Int[Tensor, " B"],
    scale: float,
    window: int | None,
    causal: bool,
) -> Float[Tensor, "B W Q D"]:
    """Attend from W rows at positions from ``start`` to the context before them and to each other.

    This is the plain form; on a TPU `jax_bridge.kernels.block_attention` streams the context past the
    block's rows instead, so that no score goes through HBM.

    Args:
        query: rotated queries of the block; ``key`` and ``value`` are its own.
        past_key, past_value: the context, in any order.
        position: which position each of its S slots holds, -1 for none; all below ``start``.
        window: how far a row sees, itself included; both ways unless ``causal``. None: everything.
        causal: whether a row is blind to the block's later rows.
    """
    tensors = (query, key, value, past_key, past_value, position, start)
    if has_torch_function(tensors):
        return handle_torch_function(block_attention, tensors, *tensors, scale, window, causal)
    return plain_block_attention(*tensors, scale, window, causal)


def plain_block_attention(
    query, key, value, past_key, past_value, position, start, scale, window, causal
) -> Float[Tensor, "B W Q D"]:
    """`block_attention` in torch's operations, whatever the tensors are."""
    at = start[:, None] + torch.arange(query.shape[2], device=start.device, dtype=start.dtype)
    seen = visible(at, position, window, causal) & (position >= 0)[:, None, None]
    inside = visible(at, at, window, causal)
    parts = [KeyValue(past_key, past_value, seen), KeyValue(key, value, inside)]
    return grouped_attention(query, parts, scale)
