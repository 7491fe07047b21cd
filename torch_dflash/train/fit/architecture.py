"""A new, untrained drafter shaped after its target."""

from __future__ import annotations

from typing import Any

import torch

from torch_dflash.proposers.dflash.config import DFlashConfig, default_target_layer_ids
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.targets.final_norm import final_norm
from torch_dflash.train.fit.heads import with_head
from torch_dflash.train.fit.options import DrafterShape

# Copied from the target, so that a draft layer costs as much as a target layer.
COPIED = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
"""For a target without rotation: no positions in attention, or no attention."""
_TARGETS_OWN = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Fields that a drafter does not read: it turns whole heads, by one position."""


def new_drafter(target: Any, shape: DrafterShape) -> DFlashDraftModel:
    """A drafter with random weights for ``target``, its layers as wide as the target's.

    Raises:
        ValueError: names the field from which no drafter can be built.
    """
    base = target.config.get_text_config()
    layers = base.num_hidden_layers
    taps = shape.taps or default_target_layer_ids(layers)
    copied = {name: getattr(base, name) for name in COPIED if getattr(base, name, None) is not None}
    kind = "sliding_attention" if shape.sliding_window else "full_attention"
    config = DFlashConfig(
        **copied,
        hidden_size=target.get_input_embeddings().weight.shape[1],
        vocab_size=base.vocab_size,
        intermediate_size=shape.intermediate_size or base.intermediate_size,
        num_hidden_layers=shape.layers,
        num_target_layers=layers,
        rope_parameters=_rope(getattr(base, "rope_parameters", None) or {}),
        layer_types=[kind] * shape.layers,
        sliding_window=shape.sliding_window,
        tie_word_embeddings=False,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=list(taps),
        sample_from_anchor=shape.head == "dspark",
        architectures=["DFlashDraftModel"],
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.init_seed)
        drafter = DFlashDraftModel(config)
    norm: Any = final_norm(target)
    if getattr(norm, "weight", None) is not None:
        # The head expects states of this scale; with ones, the first losses are many times too high.
        drafter.norm.weight.data.copy_(norm.weight.detach())
    # Every head begins with v1's weights.
    return with_head(drafter, shape.head or "dflash", shape.init_seed, **shape.sizes).to(target.device)


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    """The target's rotation without `_TARGETS_OWN`; nested if kinds of layers have their own."""
    kept = {name: value for name, value in given.items() if name not in _TARGETS_OWN}
    return {name: _rope(value) if isinstance(value, dict) else value for name, value in kept.items()} or _ROPE
