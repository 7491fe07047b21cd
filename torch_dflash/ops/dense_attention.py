"""Attention to dense buffers: a whole row's keys and values side by side."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from torch_dflash.ops.attention import AttentionInputs, KeyValue, grouped_attention
from torch_dflash.ops.lowerable import lowerable


@lowerable
def dense_attention(
    inputs: AttentionInputs,
    key: Float[Tensor, "B G S D"],
    value: Float[Tensor, "B G S Dv"],
    mask: Bool[Tensor, "B one M seen"],
) -> Float[Tensor, "B M Q Dv"]:
    """Causal attention of M rows to buffers that hold these rows already, slot p the position p.

    This is the plain form, which looks at the slots that ``mask`` is about; `jax_bridge.kernels.streamed`
    ends at the last in use.

    Args:
        inputs: the rows'; the plain form does not read their own ``key`` and ``value``.
        key, value: the buffers.
        mask: what ``inputs.start`` and ``inputs.window`` make visible, as it is shared between layers.
    """
    seen = mask.shape[3]
    part = KeyValue(key[:, :, :seen], value[:, :, :seen], mask)
    out = grouped_attention(inputs.query, [part], inputs.scale, inputs.sinks, inputs.softcap)
    return out.to(inputs.query.dtype)  # a cache may be wider
