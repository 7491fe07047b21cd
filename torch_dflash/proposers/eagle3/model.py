"""The EAGLE-3 drafter: one layer that reads a token's embedding and the state of the token before.

Source: Li et al. 2025, arXiv 2503.01840, section 3.1; tensors' names and norms are those of the speculators
library, ``models/eagle3``.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm

from torch_dflash.checks import check_types, is_count
from torch_dflash.ops.attention import Attend
from torch_dflash.proposers.checkpoint.config import DrafterConfig
from torch_dflash.proposers.checkpoint.extras import check_extras
from torch_dflash.proposers.checkpoint.fields import check_layout, check_rotation, known_fields, warn_of
from torch_dflash.proposers.checkpoint.loading import FromLayouts
from torch_dflash.proposers.dflash.model import DFlashAttention, make_rotary
from torch_dflash.proposers.dflash.vocabulary import DraftVocabulary, look_up
from torch_dflash.proposers.layouts.eagle3 import EAGLE3, published
from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.layout import Fields
from torch_dflash.proposers.layouts.pieces import without_flags


class Eagle3Config(DrafterConfig):
    """Configuration of an EAGLE-3 drafter: a layer of Llama's or Qwen3's kind, and the fields below.

    ``config.json`` is read and written in speculators' layout.

    Args:
        num_target_layers: layers of the target model; gives the default taps.
        target_layer_ids: tapped target layers, 0-based; unset: 1, n // 2 - 1 and n - 4 of n layers.
        block_size: rows of a draft, the anchor included.
        qk_norm: whether queries and keys are normed, as in Qwen3.
        norm_before_residual: whether the layer adds its output to the normed state.
        norm_before_fc, fc_norm: a norm of all taps together or of each, before ``fc``.
        norm_output: whether the next pass reads the state after the final norm.
        own_embedding, own_head: whether the drafter has its own embedding or head.
        draft_vocab_size: rows of its own head; None for ``vocab_size``.

    Raises:
        ValueError: a field is missing or cannot be honoured; the message names it and the fix.
    """

    model_type = "eagle3"
    nested_fields = ()
    is_causal, gating, final_logit_softcapping, markov_rank = True, None, None, 0
    input_embedding_scale = output_multiplier = 1.0
    dflash2 = mask_embedding = sample_from_anchor = attention_sink_bias = False
    aux_hidden_norms = context_layernorm = False

    num_hidden_layers: int = 1
    num_target_layers: int | None = None
    target_layer_ids: Any = None  # list[int]; None until the default is filled in
    block_size: int = 6
    qk_norm: bool = False
    norm_before_residual: bool = False
    norm_before_fc: bool = False
    fc_norm: bool = False
    norm_output: bool = False
    own_embedding: bool = False
    own_head: bool = False
    draft_vocab_size: int | None = None

    def __post_init__(self, **kwargs):
        super().__post_init__(**kwargs)
        self.draft_vocab_size = None if self.draft_vocab_size == self.vocab_size else self.draft_vocab_size
        layers: Any = self.num_target_layers
        if self.target_layer_ids is None and is_count(layers):
            usual = [1, layers // 2 - 1, layers - 4]
            self.target_layer_ids = usual if layers > 6 else [*range(layers)][-3:]

    @classmethod
    def in_our_fields(cls, read: Fields, where: Any) -> Fields:
        check_layout(read, where)
        check_types(read, where)
        if layout_of(read) is not EAGLE3:
            raise ValueError(
                f"speculators_model_type={read.get('speculators_model_type')!r} in {where}: not an EAGLE-3 "
                "drafter in speculators' layout; load others with torch_dflash.load_drafter."
            )
        known, unread = known_fields(read, cls)
        config = EAGLE3.fields(known, where)
        check_rotation(config, where)
        warn_of(unread, read, where)
        return without_flags(config)

    def to_diff_dict(self) -> dict[str, Any]:
        """The content of ``config.json``, in speculators' layout."""
        own = super().to_diff_dict()
        return published(self) | {
            name: own[name] for name in ("dtype", "transformers_version") if name in own
        }

    def check(self) -> None:
        """Raise ``ValueError`` for a field that no network can be built from."""
        self.check_network()
        if self.num_hidden_layers != 1:
            layers = self.num_hidden_layers
            raise ValueError(f"num_hidden_layers={layers}: EAGLE-3 drafters known here have one layer.")
        if not is_count(self.block_size) or self.block_size < 2:
            raise ValueError(f"block_size={self.block_size!r}: the anchor and at least one draft; set >= 2.")
        if self.norm_before_fc and self.fc_norm:
            raise ValueError("fc_norm=True beside norm_before_fc=True: features are normed once; set one.")
        check_extras(self)


class Eagle3Layer(nn.Module):
    """A decoder layer on rows of an embedding and a state, each normed."""

    def __init__(self, config: Any):
        super().__init__()
        hidden, eps = config.hidden_size, config.rms_norm_eps
        self.norms_residual = config.norm_before_residual
        self.self_attn = DFlashAttention(config, 0, 2 * hidden)
        if not config.qk_norm:
            own: Any = self.self_attn
            own.q_norm, own.k_norm = nn.Identity(), nn.Identity()
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = Qwen3RMSNorm(hidden, eps=eps)
        self.hidden_norm = Qwen3RMSNorm(hidden, eps=eps)
        self.post_attention_layernorm = Qwen3RMSNorm(hidden, eps=eps)

    def enter(
        self, embedded: Float[Tensor, "B R H"], states: Float[Tensor, "B R H"]
    ) -> tuple[Float[Tensor, "B R HH"], Float[Tensor, "B R H"]]:
        """(Rows for attention, twice as wide; the residual)."""
        normed = self.hidden_norm(states)
        rows = torch.cat([self.input_layernorm(embedded), normed], dim=-1)
        return rows, normed if self.norms_residual else states

    def forward(self, rows, residual, rope, attend: Attend) -> Float[Tensor, "B R H"]:
        """The states after ``rows`` of `enter`."""
        states = residual + self.self_attn(rows, rope, attend)
        return states + self.mlp(self.post_attention_layernorm(states))


class Eagle3DraftModel(FromLayouts, DraftVocabulary, PreTrainedModel):
    """An EAGLE-3 drafter. Embedding and head are the target's, unless the files hold its own."""

    config_class: Any = Eagle3Config
    config: Any
    kind = "EAGLE-3"
    base_model_prefix = "model"

    def __init__(self, config: Any):
        config.check()
        super().__init__(config)
        hidden, taps, eps = config.hidden_size, len(config.target_layer_ids), config.rms_norm_eps
        self.input_norm = Qwen3RMSNorm(taps * hidden, eps=eps) if config.norm_before_fc else None
        each = taps if config.fc_norm else 0
        self.fc_norm = nn.ModuleList(Qwen3RMSNorm(hidden, eps=eps) for _ in range(each))
        self.fc = nn.Linear(taps * hidden, hidden, bias=False)
        self.layers = nn.ModuleList([Eagle3Layer(config)])
        self.add_vocabulary(config)
        self.norm = Qwen3RMSNorm(hidden, eps=eps)
        self.rotary_emb = make_rotary(config)
        self.post_init()

    @property
    def layer(self) -> Any:
        """The only layer."""
        return self.layers[0]

    def project(self, features: Float[Tensor, "B R nH"]) -> Float[Tensor, "B R H"]:
        """The target's features to states, as the layer reads them."""
        if self.fc_norm:
            each = features.chunk(len(self.fc_norm), dim=-1)
            features = torch.cat([norm(part) for norm, part in zip(self.fc_norm, each, strict=True)], dim=-1)
        return self.fc(features if self.input_norm is None else self.input_norm(features))

    def embed(self, ids: Int[Tensor, "B R"], embed: Any, dtype: torch.dtype) -> Float[Tensor, "B R H"]:
        """``embed(ids)``, or the drafter's own embedding."""
        own = self.embed_tokens
        return (embed(ids) if own is None else look_up(ids, own.weight)).to(dtype)

    def fed(self, states: Float[Tensor, "*R H"]) -> Float[Tensor, "*R H"]:
        """The layer's output as its next pass reads it."""
        return self.norm(states) if self.config.norm_output else states
