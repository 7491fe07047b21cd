"""DFlash as a proposer: static draft K/V arrays, and a context buffer of features not yet in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from torch_dflash.cache.dense import allocate_static
from torch_dflash.cache.ring import allocate_ring
from torch_dflash.cache.spec import LayerSpec
from torch_dflash.checks import check_dtype
from torch_dflash.ops.block_attention import block_attention
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft
from torch_dflash.target.skeleton import build_skeleton


@register_state
@dataclass(frozen=True)
class DFlashState:
    """Invariant: ``length + buffered`` equals the target's committed length.

    ``context`` holds projected features of the last round's tokens. They become K/V in the next draft
    pass, in one product with the block's rows, so K/V weights are read once a round. None: just emptied.
    """

    layers: tuple  # StaticLayer or RingLayer per draft layer: context K/V, block rows are never kept
    length: Int[Tensor, " B"]
    context: Float[Tensor, "B M H"] | None
    buffered: Int[Tensor, " B"]

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Tokens taken in; equals the target's committed length between rounds."""
        return self.length + self.buffered


class DFlashProposer(nn.Module):
    """Drafts a block in one pass of a `DFlashDraftModel` skeleton and takes the argmax of rows 1..W-1.

    Args:
        drafter: the live drafter; only its class and a copy of its config are used.
        width: rows W of the block, when not the trained ``block_size``.
    """

    name = "dflash"

    def __init__(self, drafter: DFlashDraftModel, width: int | None = None):
        super().__init__()
        self.drafter: Any = build_skeleton(drafter)
        self.taps = tuple(drafter.config.target_layer_ids)
        self.width = drafter.config.block_size if width is None else width

    def start(self, plan: DecodePlan, device) -> DFlashState:
        config, dtype = self.drafter.config, self.drafter.fc.weight.dtype
        heads, dim = config.num_key_value_heads, config.head_dim
        spec, rows = LayerSpec("draft", heads, dim, dim, None), plan.verify_width

        def empty(window: int | None):
            if window is None or window + 2 * rows - 1 >= plan.slots:
                return allocate_static(spec, plan, dtype, device)
            return allocate_ring(heads, dim, plan.batch_size, window, rows, dtype, device)

        zeros = torch.zeros(plan.batch_size, dtype=torch.int32, device=device)
        return DFlashState(
            layers=tuple(empty(layer.self_attn.window) for layer in self.drafter.layers),
            length=zeros,
            context=torch.zeros(plan.batch_size, rows, config.hidden_size, dtype=dtype, device=device),
            buffered=zeros.clone(),
        )

    def observe(self, pstate, features, ids, next_ids, count) -> DFlashState:
        context = self.drafter.project(features.to(self.drafter.fc.weight.dtype))
        if pstate.context is None:  # a round: `propose` has just emptied the buffer
            return replace(pstate, context=context, buffered=count)
        check_dtype("drafter", pstate.context.dtype, context.dtype)
        # A prompt: what a previous turn left in the buffer, then these rows, straight into the K/V.
        pstate = self._append(pstate, pstate.context, pstate.buffered)
        pstate = self._append(pstate, context, count)
        return replace(pstate, buffered=torch.zeros_like(pstate.buffered))

    def _append(self, pstate: DFlashState, context: Tensor, count: Tensor) -> DFlashState:
        rope = self.drafter.rotary_emb(context, _positions(pstate.length, context.shape[1]))
        layers = tuple(
            state.write(*layer.self_attn.key_value(context, rope), pstate.length, count)
            for layer, state in zip(self.drafter.layers, pstate.layers, strict=True)
        )
        return replace(pstate, layers=layers, length=pstate.length + count)

    def propose(self, pstate, anchor, length, embed, head) -> tuple[Draft, DFlashState]:
        drafter, context = self.drafter, pstate.context
        rows = context.shape[1]
        check_dtype("drafter", context.dtype, drafter.fc.weight.dtype)
        masks = torch.full_like(anchor, drafter.config.mask_token_id)[:, None]
        ids = torch.cat([anchor[:, None], masks.expand(-1, self.width - 1)], dim=1)
        noise = embed(ids).to(context.dtype) * drafter.config.input_embedding_scale
        block_at = _positions(length, self.width)
        written: list[Any] = []

        def memory(attention, key, value):
            layer = pstate.layers[attention.index]
            layer = layer.write(key[:, :, :rows], value[:, :, :rows], pstate.length, pstate.buffered)
            written.append(layer)
            own = key[:, :, rows:], value[:, :, rows:]
            past = layer.key, layer.value, layer.positions(length)
            rule = {"window": attention.window, "causal": attention.causal}
            return lambda query, scale: block_attention(query, *own, *past, length, scale, **rule)

        position = torch.cat([_positions(pstate.length, rows), block_at], dim=1)
        hidden = drafter.block(noise, context, position, memory)
        tokens = torch.argmax(drafter.logits(hidden[:, 1:], head), dim=-1).to(torch.int32)
        draft = Draft(tokens=tokens, valid=torch.full_like(length, self.width - 1))
        # `length` and buffer move together: the buffered rows are K/V now.
        return draft, replace(
            pstate,
            layers=tuple(written),
            length=pstate.length + pstate.buffered,
            context=None,
            buffered=torch.zeros_like(pstate.buffered),
        )


def _positions(start: Tensor, width: int) -> Tensor:
    return start[:, None] + torch.arange(width, device=start.device, dtype=start.dtype)
