"""Training blocks: many anchors of one sequence in one pass, each block computed as in inference.

Source: arXiv 2602.06036 section 4 (random anchors, block-sparse attention).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from torch_dflash.ops.attention import KeyValue, attend_to, visible
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.pytrees import register_state


@register_state
@dataclass(frozen=True)
class AnchorBatch:
    """Sequences with target features and the anchors to draft from; T tokens, A anchors a row."""

    ids: Int[Tensor, "B T"]
    length: Int[Tensor, " B"]  # real tokens of each row; the rest is padding
    features: Float[Tensor, "B T nH"]  # tapped outputs of the target, one row per token
    anchors: Int[Tensor, "B A"]  # absolute positions; -1 where a row has fewer
    last: Float[Tensor, "B T H"] | None = None  # output of the target's last layer, for the KL loss


def draw_anchors(start: int, length: int, count: int, generator: torch.Generator) -> Int[Tensor, " count"]:
    """``count`` different random anchors of an answer at ``start .. length-1``; -1 where it is too short.

    An anchor and its successor are tokens of the answer, as in a round.
    """
    possible = max(length - 1 - start, 0)
    drawn = torch.randperm(possible, generator=generator)[:count] + start
    padding = torch.full((count - len(drawn),), -1)
    return torch.cat([drawn.sort().values, padding]).to(torch.int32)


def block_positions(anchors: Int[Tensor, "B A"], width: int) -> Int[Tensor, "B A W"]:
    """Absolute positions of every block's rows; row 0 is the anchor. Unused blocks stand at 0."""
    steps = torch.arange(width, device=anchors.device, dtype=anchors.dtype)
    return anchors.clamp(min=0)[..., None] + steps


def context_mask(
    anchors: Int[Tensor, "B A"], slots: Int[Tensor, " T"], width: int, window: int | None, causal: bool
) -> Bool[Tensor, "B one AW T"]:
    """The context rows that each block row sees: strictly before its anchor, within its window.

    The anchor's feature does not exist when its block is drafted, so no row may see it.
    """
    at = block_positions(anchors, width).flatten(1)
    before = slots < anchors.clamp(min=0).repeat_interleave(width, dim=1)[..., None]
    return visible(at, slots[None], window, causal) & before[:, None]


def block_targets(batch: AnchorBatch, width: int) -> tuple[Int[Tensor, "B A N"], Bool[Tensor, "B A N"]]:
    """The W-1 true tokens after each anchor, and which of them exist."""
    at = block_positions(batch.anchors, width)[..., 1:]
    known = (at < batch.length[:, None, None]) & (batch.anchors >= 0)[..., None]
    return gather_rows(batch.ids, at.clamp(max=batch.ids.shape[1] - 1)), known


def previous_tokens(batch: AnchorBatch, width: int) -> Int[Tensor, "B A N"]:
    """The true tokens before `block_targets`; the first is the anchor."""
    at = block_positions(batch.anchors, width)[..., :-1]
    return gather_rows(batch.ids, at.clamp(max=batch.ids.shape[1] - 1))


def gather_rows(rows: Tensor, at: Int[Tensor, "B A N"]) -> Tensor:
    """``rows[b, at[b, a, i]]`` for [B, T] ids or [B, T, H] states."""
    flat = at.flatten(1).long()
    if rows.ndim == 3:
        flat = flat[..., None].expand(-1, -1, rows.shape[2])
    return rows.gather(1, flat).unflatten(1, tuple(at.shape[1:]))


def draft_blocks(
    drafter: DFlashDraftModel, batch: AnchorBatch, embedding: Float[Tensor, "V H"], width: int
) -> Float[Tensor, "B A W H"]:
    """Hidden states of every block, as inference computes them at that anchor, up to rounding.

    The rows of all blocks pass through the drafter's stack as one sequence; only the masks differ.
    """
    config, blocks = drafter.config, batch.anchors.shape[1]
    anchor_ids = gather_rows(batch.ids, batch.anchors.clamp(min=0)[..., None])
    masks = torch.full_like(anchor_ids, config.mask_token_id).expand(-1, -1, width - 1)
    ids = torch.cat([anchor_ids, masks], dim=2).flatten(1)
    dtype = drafter.fc.weight.dtype  # float32 even if the target is in bfloat16
    noise = torch.nn.functional.embedding(ids, embedding).to(dtype) * config.input_embedding_scale
    context = drafter.project(batch.features.to(dtype))
    rows = context.shape[1]
    slots = torch.arange(rows, device=ids.device, dtype=batch.anchors.dtype)
    block_at = block_positions(batch.anchors, width).flatten(1)
    inside_at = torch.arange(width, device=ids.device)[None]

    def memory(attention, key, value):
        window, causal = attention.window, attention.causal
        outside = context_mask(batch.anchors, slots, width, window, causal)
        inside = visible(inside_at, inside_at, window, causal).repeat(1, 1, blocks, 1)
        return attend_to(
            KeyValue(key[:, :, :rows], value[:, :, :rows], outside),
            KeyValue(key[:, :, rows:], value[:, :, rows:], inside, blocks),
        )

    position = torch.cat([slots.expand(len(ids), -1), block_at], dim=1)
    return drafter.block(noise, context, position, memory, blocks).unflatten(1, (blocks, width))
