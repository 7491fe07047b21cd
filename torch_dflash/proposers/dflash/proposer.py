"""`DFlashProposer`: static draft K/V arrays, and a buffer of context features not yet in them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.cache.dense import StaticLayer
from torch_dflash.cache.ring import RingLayer, allocate_ring
from torch_dflash.cache.spec import LayerSpec
from torch_dflash.checks import check_dtype
from torch_dflash.ops.attention import AttentionInputs
from torch_dflash.ops.block_attention import Past, block_attention
from torch_dflash.ops.control_flow import branch
from torch_dflash.ops.windows import positions, write_rows
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.base import Cost, Proposer
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.proposers.dflash.vocabulary import noise_of
from torch_dflash.proposers.trees.nodes import Nodes, beam, children
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft, DraftRequest
from torch_dflash.targets.skeleton import build_skeleton


@register_state
@dataclass(frozen=True)
class DFlashState:
    """Invariant: ``length + buffered`` equals the target's committed length.

    ``context`` holds projected features of the last tokens. They become K/V in the next draft pass, in one
    product with the block's rows, so K/V weights are read once a round; rounds without a draft fill it first.
    """

    layers: tuple  # StaticLayer or RingLayer per draft layer: context K/V, block rows are never kept
    length: Int[Tensor, " B"]
    context: Float[Tensor, "B M H"]
    buffered: Int[Tensor, " B"]

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Tokens taken in; equals the target's committed length between rounds."""
        return self.length + self.buffered


class DFlashProposer(Proposer):
    """Drafts a block in one pass of a `DFlashDraftModel` skeleton; the drafter chooses from its rows.

    Args:
        drafter: the live drafter; only its class and a copy of its config are used.
        width: rows W of the block, when not the trained ``block_size``.
    """

    name = "dflash"

    def __init__(self, drafter: DFlashDraftModel, width: int | None = None):
        super().__init__()
        self.drafter: Any = build_skeleton(drafter)
        self.taps = tuple(drafter.config.target_layer_ids)
        self.first_row = int(not drafter.config.sample_from_anchor)  # z-lab's anchor row drafts nothing
        self.width = drafter.config.block_size + 1 - self.first_row if width is None else width

    def start(self, plan: DecodePlan, device) -> DFlashState:
        config, dtype = self.drafter.config, self.drafter.fc.weight.dtype
        heads, dim = config.num_key_value_heads, config.head_dim
        rows = plan.gain

        def empty(window: int | None):
            if window is None or window + 2 * rows - 1 >= plan.slots:
                return StaticLayer.allocate(
                    LayerSpec("attention", heads, dim, dim, None), plan, dtype, device
                )
            return allocate_ring(heads, dim, plan.batch_size, window, rows, dtype, device)

        zeros = torch.zeros(plan.batch_size, dtype=torch.int32, device=device)
        return DFlashState(
            layers=tuple(empty(layer.self_attn.window) for layer in self.drafter.layers),
            length=zeros,
            context=torch.zeros(plan.batch_size, rows, config.hidden_size, dtype=dtype, device=device),
            buffered=zeros.clone(),
        )

    def reset(self, pstate, rows) -> DFlashState:
        layers = tuple(layer.reset(rows) for layer in pstate.layers)
        return replace(super().reset(replace(pstate, layers=()), rows), layers=layers)

    def earliest(self, pstate, length) -> int:
        whole = all(length <= ring.position.shape[1] for ring in _rings(pstate))
        return 0 if whole else length - pstate.context.shape[1]  # a ring holds a window and as many rows more

    def snapshot(self, pstate) -> DFlashState:
        """The state without the dense buffers, whose earlier positions never change."""
        return replace(pstate, layers=_rings(pstate))

    def rewind(self, pstate, kept, snapshot=None) -> DFlashState:
        if snapshot is not None:
            rings = iter(snapshot.layers)
            layers = tuple(next(rings) if isinstance(own, RingLayer) else own for own in pstate.layers)
            return replace(snapshot, layers=layers)
        length = torch.minimum(pstate.length, kept)
        return replace(pstate, length=length, buffered=kept - length)

    def ingest(self, pstate, features: Any, ids, next_ids, count) -> DFlashState:
        context = self.drafter.project(features.to(self.drafter.fc.weight.dtype))
        check_dtype("drafter", pstate.context.dtype, context.dtype)
        # The rest of the previous turn in the buffer, then these rows, straight into the K/V.
        return self._append(self._flush(pstate), context, count)

    def observe(self, pstate, features: Any, ids, next_ids, count) -> DFlashState:
        context = self.drafter.project(features.to(self.drafter.fc.weight.dtype))
        # There is room: `propose` has emptied the buffer, or `skip` a full one.
        context = write_rows(pstate.context, context, pstate.buffered, dim=1)
        return replace(pstate, context=context, buffered=pstate.buffered + count)

    def skip(self, pstate, anchor, length, embed, head) -> DFlashState:
        return self._with_free_rows(pstate, 1)

    def idle(self, pstate, anchor, length, embed, head) -> DFlashState:
        return self._with_free_rows(pstate, pstate.context.shape[1])

    def cost(self, plan, context) -> Cost:
        cached = flops = 0
        config, weights = self.drafter.config, [self.drafter.fc, self.drafter.hidden_norm]
        weights += list(self.drafter.aux_hidden_norms)
        for layer in self.drafter.layers:
            own = layer.self_attn
            seen = context if own.window is None else min(context, own.window + self.width - 1)
            cached += 2 * config.num_key_value_heads * config.head_dim * seen
            flops += 4 * config.num_attention_heads * config.head_dim * seen
            weights += [own.k_proj, own.k_norm, own.v_proj]
            weights += [layer.input_layernorm] if layer.norms_context else []
        return Cost(cached, flops * plan.batch_size * self.width, tuple(weights))

    def _with_free_rows(self, pstate: DFlashState, rows: int) -> DFlashState:
        full = (pstate.buffered > pstate.context.shape[1] - rows).any()
        return branch(full, self._flush, lambda pstate: pstate, pstate)

    def _flush(self, pstate: DFlashState) -> DFlashState:
        pstate = self._append(pstate, pstate.context, pstate.buffered)
        return replace(pstate, buffered=torch.zeros_like(pstate.buffered))

    def _append(self, pstate: DFlashState, context: Tensor, count: Tensor) -> DFlashState:
        rope = self.drafter.rotary_emb(context, positions(pstate.length, context.shape[1]))
        layers = tuple(
            state.write(*layer.self_attn.key_value(layer.context_rows(context), rope), pstate.length, count)
            for layer, state in zip(self.drafter.layers, pstate.layers, strict=True)
        )
        return replace(pstate, layers=layers, length=pstate.length + count)

    def draft(self, pstate, anchor, length, embed, head, request) -> tuple[Draft, DFlashState]:
        return self.propose(pstate, anchor, length, embed, head, request)

    def propose(
        self, pstate, anchor, length, embed, head, request: DraftRequest | None = None
    ) -> tuple[Draft, DFlashState]:
        hidden, pstate = self._block(pstate, anchor, length, embed)
        noise = None if request is None else noise_of(length, request)
        tokens = self.drafter.choose(hidden, anchor, head, noise)
        return Draft(tokens=tokens, valid=torch.full_like(length, self.width - 1)), pstate

    def nodes(self, pstate, anchor, length, embed, head, request) -> tuple[Nodes, DFlashState]:
        hidden, pstate = self._block(pstate, anchor, length, embed)
        following = self.drafter.branches(hidden, head, noise_of(length, request), children(request.rows))
        return beam(following, anchor, self.width - 1, request.rows), pstate

    def _block(self, pstate: DFlashState, anchor, length, embed) -> tuple[Tensor, DFlashState]:
        """(Hidden states [B, N, H] of the drafting rows, the state after the pass)."""
        drafter, context = self.drafter, pstate.context
        rows = context.shape[1]
        check_dtype("drafter", context.dtype, drafter.fc.weight.dtype)
        block = self.width - 1 + self.first_row
        masks = torch.full_like(anchor, drafter.config.mask_token_id)[:, None]
        ids = torch.cat([anchor[:, None], masks.expand(-1, block - 1)], dim=1)
        noise = drafter.embed(ids, embed, context.dtype)
        block_at = positions(length, block)
        written: list[Any] = []

        def memory(attention, key, value):
            layer = pstate.layers[attention.index]
            layer = layer.write(key[:, :, :rows], value[:, :, :rows], pstate.length, pstate.buffered)
            written.append(layer)
            own = key[:, :, rows:], value[:, :, rows:]
            past = Past(layer.key, layer.value, layer.positions(length))

            def attend(query, scale):
                sinks = attention.attention_sink_bias
                inputs = AttentionInputs(query, *own, length, scale, attention.window, sinks)
                return block_attention(inputs, past, attention.causal)

            return attend

        position = torch.cat([positions(pstate.length, rows), block_at], dim=1)
        hidden = drafter.block(noise, context, position, memory)
        # `length` and buffer move together: the buffered rows are K/V now.
        return hidden[:, self.first_row :], replace(
            pstate,
            layers=tuple(written),
            length=pstate.length + pstate.buffered,
            buffered=torch.zeros_like(pstate.buffered),
        )


def _rings(pstate: DFlashState) -> tuple[RingLayer, ...]:
    return tuple(layer for layer in pstate.layers if isinstance(layer, RingLayer))
