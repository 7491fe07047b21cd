"""The drafter's config.json in z-lab's layout, read into one frozen, hashable dataclass."""

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

from jax_bridge.reference.rope import Rope, read_rope

_REQUIRED = object()
_NOT_ZLABS = (
    *("speculators_model_type", "transformer_layer_config", "draft_vocab_size", "sample_from_anchor"),
    "markov_rank",
    *("own_embedding", "own_head", "mask_embedding", "gating", "aux_hidden_norms", "context_layernorm"),
    *("attention_sink_bias", "add_swa_attention_sink_bias", "use_swa"),
)


@dataclass(frozen=True)
class LayerMask:
    """What a block row may see in one layer.

    Attributes:
        causal: later block rows are hidden. Context rows always precede the block.
        window: a key is visible when it is fewer than this many positions back from the query
            (and, when not causal, fewer than this many ahead); None sees everything.
    """

    causal: bool = False
    window: int | None = None


@dataclass(frozen=True)
class Second:
    """Sizes of a DFlash2 drafter.

    Attributes:
        conv_kernel_size: rows of the block under a kernel, the last of them its own.
        conv_group_size: channels with one dynamic kernel.
        selector_rank: columns of a codebook. selector_top_k: candidates of a row.
    """

    conv_kernel_size: int
    conv_group_size: int
    selector_rank: int
    selector_top_k: int


@dataclass(frozen=True)
class DrafterConfig:
    """Everything the forward needs besides the tensors. Counts are plain numbers.

    Attributes:
        target_layer_ids: 0-based target layers whose outputs are the context feature, n of them.
        masks: one ``LayerMask`` per drafter layer.
        block_size: W the drafter was trained with, anchor included.
        mask_token_id: vocabulary id standing at the rows to be drafted.
        input_embedding_scale: factor on the target's raw embedding weight.
        output_multiplier: factor on the logits, before the soft cap.
        final_logit_softcapping: cap c of ``c * tanh(logits / c)``; None or 0 for no cap.
        vocab_size: rows of a codebook; v1 has none. second: what DFlash2 adds; None for v1.
    """

    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float
    attention_bias: bool
    masks: tuple[LayerMask, ...]
    rope: Rope
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    input_embedding_scale: float
    output_multiplier: float
    final_logit_softcapping: float | None
    vocab_size: int = 0
    second: Second | None = None

    def __post_init__(self) -> None:
        """Checks what would otherwise surface as a shape error or as silent low acceptance."""
        if self.num_attention_heads % self.num_key_value_heads:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads}, not a multiple of "
                f"num_key_value_heads {self.num_key_value_heads}"
            )
        if self.head_dim % 2:
            raise ValueError(f"head_dim is {self.head_dim}; rotary embedding needs an even one")
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; it counts the anchor: at least 2")
        if not self.target_layer_ids or min(self.target_layer_ids) < 0:
            raise ValueError(f"target_layer_ids is {list(self.target_layer_ids)}; give 0-based layer indices")


def default_taps(num_target_layers: int, num_hidden_layers: int) -> tuple[int, ...]:
    """Tapped target layers when the config names none: evenly from 1 to N - 3, one per layer.

    Source: the authors' implementation; a single-layer drafter taps the middle layer.
    """
    if num_hidden_layers == 1:
        return (num_target_layers // 2,)
    step = (num_target_layers - 4) / (num_hidden_layers - 1)
    return tuple(round(1 + i * step) for i in range(num_hidden_layers))


def read_config(source: str | os.PathLike[str] | Mapping[str, Any]) -> DrafterConfig:
    """Reads a config.json, given as its path or already parsed.

    DFlash fields may stand in ``dflash_config`` or at top level; the nested one wins.

    Raises:
        ValueError: a missing, contradictory or unsupported field, by name with the fix.
    """
    raw = source if isinstance(source, Mapping) else json.loads(Path(source).read_text())
    _refuse_other_layouts(raw)
    nested = raw.get("dflash_config") or {}

    def top(name: str, default: Any = _REQUIRED, values: Mapping[str, Any] = raw) -> Any:
        value = default if values.get(name) is None else values[name]
        if value is _REQUIRED:
            raise ValueError(f"config.json: {name} is missing; add it")
        return value

    def own(name: str, default: Any = _REQUIRED) -> Any:
        return top(name, default, nested if name in nested else raw)

    if top("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {raw['hidden_act']!r}; the drafter's MLP is SwiGLU: silu")
    taps = own("target_layer_ids", None)
    if taps is None:
        taps = default_taps(top("num_target_layers"), top("num_hidden_layers"))
    softcap = own("final_logit_softcapping", None)
    return DrafterConfig(
        hidden_size=top("hidden_size"),
        intermediate_size=top("intermediate_size"),
        num_hidden_layers=top("num_hidden_layers"),
        num_attention_heads=top("num_attention_heads"),
        num_key_value_heads=top("num_key_value_heads"),
        head_dim=top("head_dim"),
        rms_norm_eps=float(top("rms_norm_eps")),
        attention_bias=bool(top("attention_bias", False)),
        masks=_masks(raw, top("num_hidden_layers")),
        rope=read_rope(raw, top("head_dim")),
        target_layer_ids=tuple(taps),
        block_size=int(own("block_size", 16)),
        mask_token_id=int(own("mask_token_id")),
        input_embedding_scale=float(own("input_embedding_scale", 1.0)),
        output_multiplier=float(own("output_multiplier", 1.0)),
        final_logit_softcapping=None if softcap is None else float(softcap),
        vocab_size=int(top("vocab_size", 0)),
        second=_second(own),
    )


def _refuse_other_layouts(raw: Mapping[str, Any]) -> None:
    """This reference knows z-lab's layout, and no part that z-lab's drafters do not have."""
    foreign = str(raw.get("model_type") or "").endswith("_assistant")
    found = [name for name in _NOT_ZLABS if raw.get(name) or (raw.get("dflash_config") or {}).get(name)]
    if foreign or found:
        name = found[0] if found else "model_type"
        raise ValueError(
            f"{name} is {raw.get(name)!r}: that is not z-lab's layout; load it with torch_dflash.load_drafter"
        )


def _second(own: Callable[..., Any]) -> Second | None:
    if own("selector_rank", None) is None:
        return None
    return Second(**{field.name: int(own(field.name)) for field in fields(Second)})


def _masks(raw: Mapping[str, Any], layers: int) -> tuple[LayerMask, ...]:
    kinds = raw.get("layer_types")
    window = raw.get("sliding_window")
    if kinds is None:
        # transformers derives the kinds from these fields when a config does not list them.
        sliding = bool(raw.get("use_sliding_window")) and window is not None
        first = raw.get("max_window_layers", 28) if sliding else layers
        kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    if len(kinds) != layers:
        raise ValueError(f"layer_types has {len(kinds)} entries; num_hidden_layers is {layers}")
    unknown = sorted(set(kinds) - {"full_attention", "sliding_attention"})
    if unknown:
        raise ValueError(f"layer_types has {unknown}; known: full_attention, sliding_attention")
    # With listed sliding layers use_sliding_window is not asked: the authors' loop cannot run
    # such a config without a window at all, and dropping a stated one costs most of acceptance.
    if "sliding_attention" in kinds and not (window and window > 0):
        raise ValueError(
            f"sliding_window is {window} and layer_types has sliding_attention; give the window, at least 1"
        )
    explicit = raw.get("is_causal")

    def mask(kind: str) -> LayerMask:
        sliding = kind == "sliding_attention"
        # An explicit is_causal holds for full layers too; without it sliding layers are causal.
        causal = sliding if explicit is None else bool(explicit)
        return LayerMask(causal, window if sliding else None)

    return tuple(mask(kind) for kind in kinds)


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
