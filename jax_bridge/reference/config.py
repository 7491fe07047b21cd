"""config.json of a drafter in z-lab's layout, or of a target, read into a frozen, hashable dataclass."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax_bridge.reference.rope import Rope, check_field, read_rope

Source = str | os.PathLike[str] | Mapping[str, Any]
"""A config.json: its path, or its parsed contents."""


@dataclass(frozen=True)
class LayerMask:
    """The keys that a block row sees in one layer.

    Attributes:
        causal: later block rows are hidden. Context rows always precede the block.
        window: a key is visible if it lies fewer than ``window`` positions before the query (and, if not
            causal, fewer than ``window`` after it); None: every key is visible.
    """

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class DFlash2Sizes:
    """Sizes of the parts that DFlash2 adds.

    Attributes:
        conv_kernel_size: rows of the block under a kernel; the last of them is the output row.
        conv_group_size: channels with one dynamic kernel.
        selector_rank: columns of a codebook. selector_top_k: candidates of a row.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True, kw_only=True)
class DecoderConfig:
    """Sizes and rotary frequencies that a drafter and a target both have."""

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    rope: Rope


@dataclass(frozen=True, kw_only=True)
class DrafterConfig(DecoderConfig):
    """All inputs of the drafter's forward pass that are no tensors.

    Attributes:
        masks: one ``LayerMask`` per drafter layer.
        target_layer_ids: 0-based target layers whose outputs are the context feature, n of them.
        block_size: W in training, anchor included.
        mask_token_id: token id at the rows to be drafted.
        input_embedding_scale: factor on the target's raw embedding weight.
        output_multiplier: factor on the logits, before the soft cap.
        final_logit_softcapping: cap c of ``c * tanh(logits / c)``; None or 0 for no cap.
        vocab_size: rows of a codebook; 0 for v1, which has no codebook.
        dflash2: None for v1.
    """

    masks: tuple[LayerMask, ...]
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    vocab_size: int = 0
    dflash2: DFlash2Sizes | None = None


@dataclass(frozen=True, kw_only=True)
class TargetConfig(DecoderConfig):
    """All inputs of the target's forward pass that are no tensors.

    Attributes:
        qk_norm: whether queries and keys are normed per head (Qwen3).
        tie_word_embeddings: whether the embedding is also the output head.
    """

    vocab_size: int
    qk_norm: bool
    tie_word_embeddings: bool


def default_taps(num_target_layers: int, num_hidden_layers: int) -> tuple[int, ...]:
    """Tapped target layers if the config names none: one per drafter layer, evenly from 1 to N - 3.

    Source: the authors' implementation; a single-layer drafter taps the middle layer.
    """
    if num_hidden_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_hidden_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_hidden_layers))


def read_config(source: Source) -> DrafterConfig:
    """Reads a drafter's config. DFlash fields stand in ``dflash_config``, which wins, or at the top level.

    Raises:
        KeyError: a missing field. ValueError: a value that this reference does not compute.
    """
    raw = _parsed(source)
    dflash = _stated({**raw, **raw.get("dflash_config", {})})
    for part in ("markov_rank", "sample_from_anchor", "use_swa"):
        check_field(dflash, part, False)
    taps = dflash.get("target_layer_ids")
    if taps is None:
        taps = default_taps(raw["num_target_layers"], raw["num_hidden_layers"])
    dflash2 = None
    if "selector_rank" in dflash:
        dflash2 = DFlash2Sizes(**{field.name: dflash[field.name] for field in fields(DFlash2Sizes)})
    return DrafterConfig(
        **_decoder(raw),
        masks=_masks(raw),
        target_layer_ids=tuple(taps),
        block_size=dflash.get("block_size", 16),
        mask_token_id=dflash["mask_token_id"],
        input_embedding_scale=dflash.get("input_embedding_scale", 1.0),
        output_multiplier=dflash.get("output_multiplier", 1.0),
        final_logit_softcapping=dflash.get("final_logit_softcapping"),
        vocab_size=raw.get("vocab_size", 0),
        dflash2=dflash2,
    )


def read_target_config(source: Source) -> TargetConfig:
    """Reads the config of a Llama or Qwen3; raises as `read_config`."""
    raw = _parsed(source)
    check_field(raw, "model_type", "llama", "qwen3")
    check_field(raw, "use_sliding_window", False)
    for kind in raw.get("layer_types", ()):
        check_field({"layer_types": kind}, "layer_types", "full_attention")
    return TargetConfig(
        **_decoder(raw),
        vocab_size=raw["vocab_size"],
        qk_norm=raw["model_type"] == "qwen3",
        tie_word_embeddings=raw.get("tie_word_embeddings", False),
    )


def _parsed(source: Source) -> dict[str, Any]:
    return _stated(source if isinstance(source, Mapping) else json.loads(Path(source).read_text()))


def _stated(raw: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in raw.items() if value is not None}


def _decoder(raw: dict[str, Any]) -> dict[str, Any]:
    check_field(raw, "hidden_act", "silu")
    heads, head_dim = raw["num_attention_heads"], raw.get("head_dim")
    head_dim = raw["hidden_size"] // heads if head_dim is None else head_dim
    return {
        **{name: raw[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers")},
        "num_attention_heads": heads,
        "num_key_value_heads": raw.get("num_key_value_heads", heads),
        "head_dim": head_dim,
        "rms_norm_eps": raw["rms_norm_eps"],
        "attention_bias": raw.get("attention_bias", False),
        "rope": read_rope(raw, head_dim),
    }


def _masks(raw: dict[str, Any]) -> tuple[LayerMask, ...]:
    layers, kinds, window = raw["num_hidden_layers"], raw.get("layer_types"), raw.get("sliding_window")
    if kinds is None:
        # transformers derives the kinds from these fields when a config does not list them.
        sliding = raw.get("use_sliding_window") and window is not None
        first = raw.get("max_window_layers", 28) if sliding else layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]

    def mask(kind: str) -> LayerMask:
        # An explicit is_causal holds for full layers too; without it sliding layers are causal.
        # use_sliding_window=False does not undo a listed sliding layer: acceptance would mostly be lost.
        causal, size = {"full_attention": (False, None), "sliding_attention": (True, window)}[kind]
        return LayerMask(raw.get("is_causal", causal), size)

    return tuple(mask(kind) for kind in kinds)
