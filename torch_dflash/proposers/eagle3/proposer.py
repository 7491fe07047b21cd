"""`Eagle3Proposer`: a chain of passes; each reads the token before and the state of the pass before."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from torch_dflash.cache.dense import StaticLayer
from torch_dflash.cache.spec import LayerSpec
from torch_dflash.checks import check_dtype
from torch_dflash.ops.attention import AttentionInputs, dense_attention, visible
from torch_dflash.ops.control_flow import repeat
from torch_dflash.ops.windows import positions, reach, take_row
from torch_dflash.plan import DecodePlan
from torch_dflash.proposers.base import Cost, Proposer
from torch_dflash.proposers.dflash.vocabulary import noise_of
from torch_dflash.proposers.eagle3.model import Eagle3DraftModel
from torch_dflash.pytrees import register_state
from torch_dflash.state import Draft, DraftRequest
from torch_dflash.targets.skeleton import build_skeleton


@register_state
@dataclass(frozen=True)
class Eagle3State:
    """Keys and values of the tokens taken in, and the state of the last one, before the anchor.

    A row of a token holds the embedding of the token behind. Rows of drafts lie behind ``length``; the next
    tokens are written over them.
    """

    layer: StaticLayer
    length: Int[Tensor, " B"]
    state: Float[Tensor, "B H"]

    @property
    def committed(self) -> Int[Tensor, " B"]:
        """Tokens taken in; equals the target's committed length between rounds."""
        return self.length


class Eagle3Proposer(Proposer):
    """Drafts a chain with an `Eagle3DraftModel` skeleton, in a loop of one pass a token.

    Args:
        drafter: the live drafter; only its class and a copy of its config are used.
        width: rows of the draft, the anchor included, when not the drafter's ``block_size``.
    """

    name = "eagle3"
    ahead = 1

    def __init__(self, drafter: Eagle3DraftModel, width: int | None = None):
        super().__init__()
        self.drafter: Any = build_skeleton(drafter)
        self.taps = tuple(drafter.config.target_layer_ids)
        self.width = drafter.config.block_size if width is None else width

    def start(self, plan: DecodePlan, device) -> Eagle3State:
        config, dtype = self.drafter.config, self.drafter.fc.weight.dtype
        spec = LayerSpec("attention", config.num_key_value_heads, config.head_dim, config.head_dim, None)
        return Eagle3State(
            layer=StaticLayer.allocate(spec, plan, dtype, device),
            length=torch.zeros(plan.batch_size, dtype=torch.int32, device=device),
            state=torch.zeros(plan.batch_size, config.hidden_size, dtype=dtype, device=device),
        )

    def earliest(self, pstate, length) -> int:
        return 0

    def snapshot(self, pstate) -> tuple:
        return ()

    def rewind(self, pstate, kept, snapshot=None) -> Eagle3State:
        """The state of the row's last token comes with its next tokens, which are read before any draft.

        A session of a recurrent target goes on from places where a text was cut. The row before such a place
        keeps the embedding of the token that the target picked there: drafts may differ, texts do not.
        """
        return replace(pstate, length=kept.clone())

    def observe(self, pstate, features: Any, ids, next_ids, count, embed) -> Eagle3State:
        states = self.drafter.project(features.to(self.drafter.fc.weight.dtype))
        check_dtype("drafter", pstate.state.dtype, states.dtype)
        known = next_ids.clamp(min=0)  # -1 in rows that are not fed
        state, layer = self._read(pstate.layer, pstate.length, states, known, embed, count)
        state = torch.where((count > 0)[:, None], state, pstate.state)
        return Eagle3State(layer, pstate.length + count, state)

    def ingest(self, pstate, features, ids, next_ids, count, embed) -> Eagle3State:
        return self.observe(pstate, features, ids, next_ids, count, embed)

    def skip(self, pstate, anchor, length, embed, head) -> Eagle3State:
        return pstate

    def idle(self, pstate, anchor, length, embed, head) -> Eagle3State:
        return pstate

    def cost(self, plan, context) -> Cost:
        drafter, passes = self.drafter, self.width - 1
        config, own, prompt = drafter.config, drafter.layer, [drafter.fc]
        seen = context if own.self_attn.window is None else min(context, own.self_attn.window)
        prompt += [part for part in (drafter.input_norm, *drafter.fc_norm) if part is not None]
        looped = own, drafter.norm, *([] if drafter.lm_head is None else [drafter.lm_head])
        return Cost(
            cached=2 * config.num_key_value_heads * config.head_dim * seen * passes,
            flops=4 * config.num_attention_heads * config.head_dim * seen * plan.batch_size * passes,
            prompt=(*prompt, own),
            passes=passes,
            looped=looped,
        )

    def draft(self, pstate, anchor, length, embed, head, request) -> tuple[Draft, Eagle3State]:
        return self.propose(pstate, anchor, length, embed, head, request)

    def propose(
        self, pstate, anchor, length, embed, head, request: DraftRequest | None = None
    ) -> tuple[Draft, Eagle3State]:
        drafter, drafts = self.drafter, self.width - 1
        check_dtype("drafter", pstate.state.dtype, drafter.fc.weight.dtype)
        column = torch.arange(drafts, device=length.device)

        def chosen(state: Tensor, at: Tensor) -> Tensor:
            """The draft behind position ``at``."""
            noise = None if request is None else noise_of(at, request)
            return drafter.choose(drafter.norm(state)[:, None], anchor, head, noise)

        def one(number: Any, tokens: Tensor, token: Tensor, state: Tensor, layer: StaticLayer) -> tuple:
            at = length + number
            state, layer = self._read(layer, at, drafter.fed(state)[:, None], token, embed)
            token = chosen(state, at + 1)
            return torch.where(column == number + 1, token, tokens), token, state, layer

        token = chosen(pstate.state, length)
        first = token.expand(-1, drafts).clone(), token, pstate.state, pstate.layer
        tokens, _, _, layer = repeat(one, drafts - 1, *first)
        return Draft(tokens, torch.full_like(length, drafts)), replace(pstate, layer=layer)

    def _read(
        self,
        layer: StaticLayer,
        start: Int[Tensor, " B"],
        states: Float[Tensor, "B R H"],
        next_ids: Int[Tensor, "B R"],
        embed: Any,
        count: Int[Tensor, " B"] | None = None,
    ) -> tuple[Float[Tensor, "B H"], StaticLayer]:
        """(The state of the last of the first ``count`` rows from position ``start`` on, their layer).

        All rows leave keys and values, and only the last one asks; ``count`` unset: there is one row.
        """
        drafter, own = self.drafter, self.drafter.layer
        rows, residual = own.enter(drafter.embed(next_ids, embed, states.dtype), states)
        rope = drafter.rotary_emb(rows, positions(start, rows.shape[1]))
        key, value = own.self_attn.key_value(rows, rope)
        layer = layer.write(key, value, start, count)
        if count is not None:
            last = (count - 1).clamp(min=0)
            start, rope = start + last, tuple(take_row(table, last) for table in rope)
            rows, residual = take_row(rows, last), take_row(residual, last)
            key, value = (take_row(part.transpose(1, 2), last).transpose(1, 2) for part in (key, value))

        def attend(query: Tensor, scale: float) -> Tensor:
            inputs = AttentionInputs(query, key, value, start, scale, own.self_attn.window)
            slots = torch.arange(reach(start, 1, layer.key.shape[2]), device=start.device, dtype=start.dtype)
            mask = visible(start[:, None], slots[None], inputs.window, causal=True)
            return dense_attention(inputs, layer.key, layer.value, mask)

        return own(rows, residual, rope, attend)[:, 0], layer
