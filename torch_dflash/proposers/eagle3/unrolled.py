"""The passes of many drafts over a known text, as EAGLE-3 trains them ("training-time test").

Source: arXiv 2503.01840, section 3.1.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.ops.attention import KeyValue, attend_to, visible
from torch_dflash.proposers.eagle3.model import Eagle3DraftModel


def unrolled_states(
    drafter: Eagle3DraftModel,
    ids: Int[Tensor, "B T"],
    features: Float[Tensor, "B T nH"],
    anchors: Int[Tensor, "B A"],
    embedding: Float[Tensor, "V H"],
    count: int,
) -> Float[Tensor, "B A N H"]:
    """The states of ``count`` drafts after each anchor, ready for the head, as decoding computes them there.

    The k-th pass reads the k-th token of the text from the anchor on, whatever was drafted, and the state of
    the pass before. It sees the features before the anchor, and the rows of the anchor's own passes.

    Args:
        ids, features: of the text. anchors: positions from 1 on; smaller ones give senseless states.
        embedding: the target's.
    """
    layer, own = drafter.layer, drafter.layer.self_attn
    projected = drafter.project(features.to(drafter.fc.weight.dtype))
    batch, text = ids.shape
    blocks = anchors.shape[1]
    anchors = anchors.clamp(min=1)

    def embedded(ids: Tensor) -> Tensor:
        return drafter.embed(ids, lambda ids: F.embedding(ids, embedding), projected.dtype)

    def turned(start: Tensor) -> tuple[Tensor, ...]:
        return drafter.rotary_emb(projected, start)

    def before(rows: Tensor) -> Tensor:
        return rows.gather(1, (anchors - 1).long()[..., None].expand(-1, -1, rows.shape[2]))

    slots = torch.arange(text, device=ids.device, dtype=anchors.dtype)
    rows, residual = layer.enter(embedded(ids.roll(-1, 1)), projected)
    context = own.key_value(rows, turned(slots.expand(batch, -1)))
    rows, residual = before(rows), before(residual)
    found, made = [], []
    for trip in range(count):
        at = anchors + (trip - 1)
        rope = turned(at)
        if trip:
            token = ids.gather(1, (at + 1).clamp(max=text - 1).long())
            rows, residual = layer.enter(embedded(token), drafter.fed(found[-1]))
            made.append(own.key_value(rows, rope))
        seen = visible(at, slots[None], own.window, True) & (slots < anchors[..., None])[:, None]
        parts = [KeyValue(context[0], context[1], seen)]
        if trip:
            near = torch.arange(1, trip + 1, device=ids.device) > trip - (own.window or trip)
            key, value = (torch.stack(part, dim=3).flatten(2, 3) for part in zip(*made, strict=True))
            parts.append(KeyValue(key, value, near.expand(batch, 1, blocks, -1), blocks))
        found.append(layer(rows, residual, rope, attend_to(*parts)))
    return drafter.norm(torch.stack(found, dim=2))
