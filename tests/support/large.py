"""Targets that do not fit on a chip, in their real width and cut to two layers, with drafters of one."""

from __future__ import annotations

from typing import Any

from transformers import GptOssConfig, LlamaConfig, Qwen3Config, Qwen3MoeConfig

from torch_dflash.selftest.pairs import drafter_config

SHARED = {"num_hidden_layers": 2, "max_position_embeddings": 40960, "tie_word_embeddings": False}
QWEN3_32B = {
    "hidden_size": 5120,
    "intermediate_size": 25600,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 128256,
}
QWEN3_CODER = {
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "vocab_size": 151936,
}
GPT_OSS_120B = {
    "hidden_size": 2880,
    "intermediate_size": 2880,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "num_local_experts": 128,
    "num_experts_per_tok": 4,
    "vocab_size": 201088,
    "sliding_window": 128,
    "layer_types": ["sliding_attention", "full_attention"],
}
LARGE: dict[str, tuple[Any, dict[str, Any]]] = {
    "qwen3-32b": (Qwen3Config, QWEN3_32B),
    "llama-3.3-70b": (LlamaConfig, LLAMA_70B),
    "qwen3-coder-30b": (Qwen3MoeConfig, QWEN3_CODER),
    "gpt-oss-120b": (GptOssConfig, GPT_OSS_120B),
}
SECOND = {"selector_rank": 256, "selector_top_k": 16, "conv_group_size": 128}


def large_pair(name: str, drafter: str = "v1") -> tuple[Any, Any]:
    """Configs of a target and of a drafter in the shape that the published ones have."""
    config, sizes = LARGE[name]
    target = config(**(sizes | SHARED))
    alike = {key: sizes[key] for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    further = SECOND if drafter == "dflash2" else {}
    wide = {2880: 7680}.get(target.hidden_size, target.intermediate_size)
    own = {"intermediate_size": wide, "num_hidden_layers": 1, "target_layer_ids": [0, 1], "block_size": 16}
    return target, drafter_config(target, max_position_embeddings=40960, **alike, **own, **further)
