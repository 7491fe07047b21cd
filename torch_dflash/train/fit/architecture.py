"""A new, untrained drafter shaped after its target."""

from __future__ import annotations

from typing import Any

import torch

from torch_dflash.proposers.checkpoints import drafter_of
from torch_dflash.proposers.dflash.config import DFlashConfig, default_target_layer_ids
from torch_dflash.proposers.eagle3.model import Eagle3Config
from torch_dflash.proposers.medusa.model import MedusaConfig
from torch_dflash.targets.final_norm import final_norm
from torch_dflash.train.fit.heads import with_head
from torch_dflash.train.fit.options import DrafterShape

# Copied from the target, so that a draft layer costs as much as a target layer.
COPIED = ("num_attention_heads", "num_key_value_heads", "head_dim", "rms_norm_eps", "max_position_embeddings")

_ROPE: dict[str, Any] = {"rope_type": "default", "rope_theta": 10_000.0}
"""For a target without rotation: no positions in attention, or no attention."""
_TARGETS_OWN = ("partial_rotary_factor", "mrope_section", "mrope_interleaved")
"""Fields that a drafter does not read: it turns whole heads, by one position."""


def new_drafter(target: Any, shape: DrafterShape) -> Any:
    """A drafter with random weights for ``target``, of the kind of ``shape.head``.

    Raises:
        ValueError: names the field from which no drafter can be built.
    """
    config = CONFIGS.get(shape.head or "", _dflash)(target, shape)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(shape.init_seed)
        drafter: Any = drafter_of(config)
    norm: Any = final_norm(target)
    if getattr(norm, "weight", None) is not None:
        # The head expects states of this scale; with ones, the first losses are many times too high.
        drafter.norm.weight.data.copy_(norm.weight.detach())
    # Every head of DFlash begins with v1's weights.
    head: str = shape.head or "dflash"
    return with_head(drafter, head, shape.init_seed, False, **shape.sizes).to(target.device)


def _dflash(target: Any, shape: DrafterShape) -> DFlashConfig:
    """v1, its layers as wide as the target's."""
    base, count = target.config.get_text_config(), shape.layers or 5
    taps = shape.taps or default_target_layer_ids(base.num_hidden_layers)
    kind = "sliding_attention" if shape.sliding_window else "full_attention"
    return DFlashConfig(
        **_of_target(target),
        **_layers(target, shape),
        num_hidden_layers=count,
        layer_types=[kind] * count,
        sliding_window=shape.sliding_window,
        tie_word_embeddings=False,
        block_size=shape.block_size,
        mask_token_id=shape.mask_token_id,
        target_layer_ids=list(taps),
        sample_from_anchor=shape.head == "dspark",
        architectures=["DFlashDraftModel"],
    )


def _medusa(target: Any, shape: DrafterShape) -> MedusaConfig:
    base = target.config.get_text_config()
    return MedusaConfig(
        **_of_target(target),
        medusa_num_heads=shape.block_size - 1,
        medusa_num_layers=shape.layers or 1,
        target_layer_ids=list(shape.taps) if shape.taps else None,
        rms_norm_eps=getattr(base, "rms_norm_eps", MedusaConfig.rms_norm_eps),
        original_lm_head=True,
    )


def _eagle3(target: Any, shape: DrafterShape) -> Eagle3Config:
    return Eagle3Config(
        **_of_target(target),
        **_layers(target, shape),
        block_size=shape.block_size,
        target_layer_ids=list(shape.taps) if shape.taps else None,
        fc_norm=True,  # taps differ in scale by orders of magnitude
    )


CONFIGS = {"medusa": _medusa, "eagle3": _eagle3}
"""Configs of heads of other kinds than DFlash, by head."""


def _of_target(target: Any) -> dict[str, Any]:
    base = target.config.get_text_config()
    hidden = target.get_input_embeddings().weight.shape[1]
    return {
        "hidden_size": hidden,
        "vocab_size": base.vocab_size,
        "num_target_layers": base.num_hidden_layers,
    }


def _layers(target: Any, shape: DrafterShape) -> dict[str, Any]:
    """Sizes of a draft layer, the target's."""
    base = target.config.get_text_config()
    copied = {name: getattr(base, name) for name in COPIED if getattr(base, name, None) is not None}
    size = shape.intermediate_size or base.intermediate_size
    rope = _rope(getattr(base, "rope_parameters", None) or {})
    return copied | {"intermediate_size": size, "rope_parameters": rope}


def _rope(given: dict[str, Any]) -> dict[str, Any]:
    """The target's rotation without `_TARGETS_OWN`; nested if kinds of layers have their own."""
    kept = {name: value for name, value in given.items() if name not in _TARGETS_OWN}
    return {name: _rope(value) if isinstance(value, dict) else value for name, value in kept.items()} or _ROPE
