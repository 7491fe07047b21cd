"""The DFlash v1 drafter: a Qwen3-style stack that denoises a block against projected target features.

Source: arXiv 2602.06036 section 3. Context rows enter every layer as keys and values only: they get no
query, no input norm, no MLP. The block's rows see the context and (unless causal) each other.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.cache_utils import Cache
from transformers.modeling_outputs import BaseModelOutputWithPast
from transformers.models.qwen3.modeling_qwen3 import (
    Qwen3MLP,
    Qwen3RMSNorm,
    Qwen3RotaryEmbedding,
    rotate_half,
)

from torch_dflash.ops.attention import Attend, KeyValue, attend_to, finite_values, visible
from torch_dflash.proposers.checkpoint.extras import check_loop
from torch_dflash.proposers.checkpoint.hub import OnHub
from torch_dflash.proposers.checkpoint.loading import FromLayouts
from torch_dflash.proposers.dflash.config import DFlashConfig
from torch_dflash.proposers.dflash.vocabulary import DraftVocabulary


class DFlashAttention(nn.Module):
    """Queries from the block; keys and values from context rows and block rows through one projection.

    ``inputs``: size of a row, where it is not the hidden size.
    """

    def __init__(self, config: Any, index: int, inputs: int | None = None):
        super().__init__()
        self.index = index
        self.head_dim = config.head_dim
        self.scale = config.head_dim**-0.5
        sliding = config.layer_types[index] == "sliding_attention"
        self.window = config.sliding_window if sliding else None
        self.causal = sliding if config.is_causal is None else config.is_causal
        hidden, bias = config.hidden_size, config.attention_bias
        size = hidden if inputs is None else inputs
        self.q_proj = nn.Linear(size, config.num_attention_heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(size, config.num_key_value_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(config.num_attention_heads * self.head_dim, hidden, bias=bias)
        self.q_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        self.k_norm = Qwen3RMSNorm(self.head_dim, eps=config.rms_norm_eps)
        heads = config.num_attention_heads
        self.attention_sink_bias = nn.Parameter(torch.zeros(heads)) if config.attention_sink_bias else None
        gates = {None: 0, "per-head": heads, "per-element": heads * self.head_dim}[config.gating]
        self.g_proj = nn.Linear(hidden, gates, bias=False) if gates else None

    def _heads(self, rows: Tensor) -> Tensor:
        return rows.unflatten(-1, (-1, self.head_dim))

    def query(self, block: Float[Tensor, "B W H"], rope) -> Float[Tensor, "B Q W D"]:
        """Rotated queries of the block rows."""
        return _rotate(self.q_norm(self._heads(self.q_proj(block))).transpose(1, 2), rope)

    def key_value(self, rows: Float[Tensor, "B R H"], rope) -> tuple[Tensor, Tensor]:
        """Rotated keys and values [B, G, R, D] of context or block rows, through `finite_values`."""
        key = _rotate(self.k_norm(self._heads(self.k_proj(rows))).transpose(1, 2), rope)
        return finite_values(key, self._heads(self.v_proj(rows)).transpose(1, 2))

    def forward(self, block, rope, attend: Attend) -> Float[Tensor, "B W H"]:
        """Attend from the block, apply the gate if there is one, and project back."""
        seen = attend(self.query(block, rope), self.scale)
        if self.g_proj is not None:  # one weight a head, or one a channel; softplus in float32
            gate = F.softplus(self.g_proj(block).float()).to(seen.dtype)
            seen = seen * gate.unflatten(-1, (seen.shape[2], -1))
        return self.o_proj(seen.flatten(2))


class DFlashLayer(nn.Module):
    """One Qwen3 block; ``memory`` takes the layer's new keys and values and returns its `Attend`."""

    def __init__(self, config: DFlashConfig, index: int):
        super().__init__()
        self.self_attn = DFlashAttention(config, index)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.post_attention_layernorm = Qwen3RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
        self.norms_context = config.context_layernorm

    def context_rows(self, context: Float[Tensor, "B R H"]) -> Float[Tensor, "B R H"]:
        """The context for this layer's keys and values; Laguna's drafters norm it a second time."""
        return self.input_layernorm(context) if self.norms_context else context

    def forward(self, block, context, rope, block_rope, memory, blocks=1) -> Float[Tensor, "B W H"]:
        """``rope`` covers context rows then block rows; ``block_rope`` the block rows alone."""
        normed = self.input_layernorm(block)
        block = block + self.attend(normed, blocks, context, rope, block_rope, memory)
        return block + self.feed(self.post_attention_layernorm(block), blocks)

    def attend(self, normed, blocks, context, rope, block_rope, memory) -> Float[Tensor, "B W H"]:
        """Attention from normed block rows to context and block; ``memory`` masks ``blocks``."""
        rows = torch.cat([self.context_rows(context), normed], dim=1)
        key, value = self.self_attn.key_value(rows, rope)
        return self.self_attn(normed, block_rope, memory(self.self_attn, key, value))

    def feed(self, normed, blocks) -> Float[Tensor, "B W H"]:
        """The MLP of normed block rows."""
        return self.mlp(normed)


class DFlashDraftModel(DraftVocabulary, OnHub, FromLayouts, PreTrainedModel):
    """A DFlash v1 drafter. z-lab's have no embedding and no head: both are the target's.

    ``from_pretrained`` reads a directory or a hub id in any of `torch_dflash.proposers.layouts`, without
    remote code.
    """

    config_class: Any = DFlashConfig
    kind = "DFlash v1"
    layer_class: type[DFlashLayer] = DFlashLayer
    config: Any  # DFlashConfig; its inherited fields are typed as optional
    base_model_prefix = "model"
    _no_split_modules = ["DFlashLayer"]
    spec_generate: Callable[..., Any]  # of `torch_dflash.integrations.spec_generate`

    def __init__(self, config: Any):
        config.check()
        super().__init__(config)
        taps, hidden = len(config.target_layer_ids), config.hidden_size
        self.layers = nn.ModuleList(self.layer_class(config, i) for i in range(config.num_hidden_layers))
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        each = taps if config.aux_hidden_norms else 0
        self.aux_hidden_norms = nn.ModuleList(
            Qwen3RMSNorm(hidden, eps=config.rms_norm_eps) for _ in range(each)
        )
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.add_vocabulary(config)
        self.norm = Qwen3RMSNorm(hidden, eps=config.rms_norm_eps)
        self.rotary_emb = make_rotary(config)
        self.post_init()

    def __getattr__(self, name: str) -> Any:
        if name == "generation_config":  # read by transformers from an assistant that generates itself
            raise AttributeError(
                "a DFlash drafter does not generate on its own: pass speculation_type='dflash' beside "
                "assistant_model, or custom_generate=torch_dflash.dflash(drafter) without it."
            )
        return super().__getattr__(name)

    def project(self, features: Float[Tensor, "B R nH"]) -> Float[Tensor, "B R H"]:
        """Target features to context rows: ``hidden_norm(fc(features))``, once per token for all layers.

        With ``aux_hidden_norms`` the features of each tap are normed first.
        """
        if self.aux_hidden_norms:
            each = features.chunk(len(self.aux_hidden_norms), dim=-1)
            normed = [norm(part) for norm, part in zip(self.aux_hidden_norms, each, strict=True)]
            features = torch.cat(normed, dim=-1)
        return self.hidden_norm(self.fc(features))

    def block(
        self,
        noise: Float[Tensor, "B W H"],
        context: Float[Tensor, "B R H"],
        position: Int[Tensor, "B R+W"],
        memory,
        blocks: int = 1,
    ) -> Float[Tensor, "B W H"]:
        """The stack on a block, given projected context rows new to this pass, up to the final norm.

        ``position`` holds absolute positions of the context rows, then of the block rows.
        ``memory(attention, key, value)`` stores context rows and returns an `Attend` over all rows.
        ``blocks``: number of consecutive blocks in the W rows (training drafts many in one pass).
        """
        rope = self.rotary_emb(noise, position)
        block_rope = tuple(table[:, context.shape[1] :] for table in rope)
        for layer in self.layers:
            noise = layer(noise, context, rope, block_rope, memory, blocks)
        return self.norm(noise)

    def forward(
        self,
        noise_embeds: Float[Tensor, "B W H"],
        context_hidden_states: Float[Tensor, "B R nH"],
        position_ids: Int[Tensor, "B R+W"],
        attention_mask: Tensor | None = None,
        cache: Cache | None = None,
        past_key_values: Cache | None = None,
        **kwargs,
    ) -> BaseModelOutputWithPast:
        """One draft pass on a growing cache: the contract of transformers' native DFlash.

        Args:
            noise_embeds: target embeddings of ``[anchor, mask, ...]``.
            context_hidden_states: tapped target features of the tokens committed since the last pass.
            position_ids: absolute positions of the context rows, then of the block.
            attention_mask: 2-D padding mask over all keys (1 = real), or None.
            cache: holds earlier context; the caller crops the block's rows off again.
            past_key_values: its name before transformers 5.24.

        Returns:
            ``.last_hidden_state`` [B, W, H]; row i is the state of the token at the block's position i.

        Raises:
            ValueError: as of `check_loop`.
        """
        if isinstance(noise_embeds, nn.Module):  # as transformers calls a custom generate
            raise TypeError("custom_generate=DFlashDraftModel: pass torch_dflash.dflash(drafter).")
        cache = past_key_values if cache is None else cache
        check_loop(cache, self.config)

        def memory(attention, key, value):
            if cache is not None:
                key, value = cache.update(key, value, attention.index)
            end = position_ids[:, -1:]
            at = end + 1 - key.shape[2] + torch.arange(key.shape[2], device=end.device)
            block = position_ids[:, -noise_embeds.shape[1] :]
            mask = visible(block, at, attention.window, attention.causal)
            if attention_mask is not None:
                mask = mask & attention_mask[:, None, None, -key.shape[2] :].bool()
            return attend_to(KeyValue(key, value, mask), sinks=attention.attention_sink_bias)

        context = self.project(context_hidden_states)
        hidden = self.block(noise_embeds, context, position_ids, memory)
        return BaseModelOutputWithPast(hidden, cache)


def make_rotary(config: Any) -> nn.Module:
    """The rotary embedding of a drafter's config.

    Raises:
        ValueError: ``rope_parameters`` name an unknown kind, or lack a field.
    """
    try:
        return Qwen3RotaryEmbedding(config)
    except KeyError as error:
        raise ValueError(
            f"rope_parameters={config.rope_parameters}: {error} is unknown or missing; set a static "
            "rope_type (default, linear, yarn, llama3) and its fields."
        ) from error


def _rotate(rows: Float[Tensor, "B heads R D"], rope) -> Float[Tensor, "B heads R D"]:
    cos, sin = (table[:, None] for table in rope)
    return rows * cos + rotate_half(rows) * sin
