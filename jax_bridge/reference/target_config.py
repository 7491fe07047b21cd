"""A Llama or Qwen3 config.json, read into one frozen, hashable dataclass."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jax_bridge.reference.rope import Rope, read_rope

FAMILIES = ("llama", "qwen3")


@dataclass(frozen=True)
class TargetConfig:
    """Everything the target's forward needs besides the tensors.

    Attributes:
        qk_norm: whether queries and keys are normed per head (Qwen3).
        tie_word_embeddings: whether the embedding is the output head too.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    qk_norm: bool
    tie_word_embeddings: bool
    rope: Rope


def read_target_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> TargetConfig:
    """Reads a config.json, given as its path or already parsed.

    Raises:
        ValueError: another architecture, or a missing or unsupported field, by name with the fix.
    """
    raw = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())

    def need(name: str) -> Any:
        if raw.get(name) is None:
            raise ValueError(f"config.json: {name} is missing; add it")
        return raw[name]

    family = raw.get("model_type")
    if family not in FAMILIES:
        raise ValueError(f"model_type is {family!r}; this reference has {', '.join(FAMILIES)}")
    if raw.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; this reference has silu")
    if raw.get("mlp_bias"):
        raise ValueError("mlp_bias is true; this reference has MLPs without bias")
    sliding = "sliding_attention" in (raw.get("layer_types") or ())
    if sliding or raw.get("use_sliding_window"):
        raise ValueError(
            "layer_types or use_sliding_window asks for sliding windows; this reference's targets see "
            "everything: use a checkpoint with full_attention layers"
        )
    heads = need("num_attention_heads")
    groups = raw.get("num_key_value_heads") or heads
    if heads % groups:
        raise ValueError(f"num_attention_heads is {heads}, not a multiple of num_key_value_heads {groups}")
    head_dim = raw.get("head_dim") or need("hidden_size") // heads
    return TargetConfig(
        vocab_size=need("vocab_size"),
        hidden_size=need("hidden_size"),
        intermediate_size=need("intermediate_size"),
        num_hidden_layers=need("num_hidden_layers"),
        num_attention_heads=heads,
        num_key_value_heads=groups,
        head_dim=head_dim,
        rms_norm_eps=float(need("rms_norm_eps")),
        attention_bias=bool(raw.get("attention_bias")),
        qk_norm=family == "qwen3",
        tie_word_embeddings=bool(raw.get("tie_word_embeddings")),
        rope=read_rope(raw, head_dim),
    )
