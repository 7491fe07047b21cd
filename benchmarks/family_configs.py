"""Tiny configs for every model type that transformers calls a causal LM, and for some of their variants."""

from __future__ import annotations

from dataclasses import fields
from typing import Any, cast

import torch
import transformers
from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, PretrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

VOCAB = 97
LAYERS = 4
# Set where a config has the field. Names of one line mean the same in different families.
SMALL: dict[str, Any] = (
    dict.fromkeys(["vocab_size", "n_words", "vocab_size_per_layer_input", "unpadded_vocab_size"], VOCAB)
    | dict.fromkeys(["hidden_size", "d_model", "n_embd", "n_embed", "emb_dim", "dim", "embedding_size"], 32)
    | dict.fromkeys(["intermediate_size", "ffn_dim", "decoder_ffn_dim", "encoder_ffn_dim", "n_inner"], 48)
    | dict.fromkeys(["num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers"], LAYERS)
    | dict.fromkeys(["encoder_layers", "num_encoder_layers"], LAYERS)  # some caches count these
    | dict.fromkeys(["num_attention_heads", "n_head", "n_heads", "num_heads", "attention_heads"], 4)
    | dict.fromkeys(["decoder_attention_heads", "encoder_attention_heads"], 4)
    | dict.fromkeys(["max_position_embeddings", "n_positions", "n_ctx", "max_seq_len"], 512)
    | dict.fromkeys(["num_key_value_heads", "num_kv_heads", "encoder_kv_heads"], 2)
    | dict.fromkeys(["sliding_window", "window_size", "local_attention", "attention_window_size"], 6)
    | dict.fromkeys(["sliding_window_size", "attention_chunk_size"], 6)
    | dict.fromkeys(["n_routed_experts", "num_experts", "num_local_experts", "moe_num_experts"], 4)
    | dict.fromkeys(["num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"], 2)
    | dict.fromkeys(["moe_intermediate_size", "shared_expert_intermediate_size"], 16)
    | dict.fromkeys(["dense_intermediate_size", "expert_ffn_hidden_size", "ffn_hidden_size"], 24)
    | dict.fromkeys(["kv_lora_rank", "q_lora_rank", "o_lora_rank", "linear_head_dim"], 16)
    | dict.fromkeys(["linear_key_head_dim", "linear_value_head_dim"], 8)
    | dict.fromkeys(["linear_num_key_heads", "linear_num_value_heads", "linear_num_heads"], 4)
    | dict.fromkeys(["type_vocab_size", "n_group", "moe_num_shared_experts", "max_window_layers"], 2)
    | dict.fromkeys(["topk_group", "first_k_dense_replace", "n_shared_experts", "num_shared_experts"], 1)
    | {
        "head_dim": 8,
        "shared_intermediate_size": 24,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 12,  # narrower than K
        "index_head_dim": 8,
        "index_n_heads": 16,  # of few, many scores are zero, and any of equal keys may be chosen
        "index_topk": 8,
        "query_pre_attn_scalar": 8,
        "hidden_size_per_layer_input": 8,
        "rotary_dim": 4,
        "use_sliding_window": True,
        "is_decoder": True,
        "is_encoder_decoder": False,
        "tie_word_embeddings": False,
        "use_cache": True,
        "dropout": 0.0,
        "router_jitter_noise": 0.0,
    }
)
HYBRID = ["linear_attention", "full_attention"] * (LAYERS // 2)
MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
SECTIONS = {"rope_parameters": ROPE | {"mrope_section": [1, 1, 2]}}
MLA = {
    "num_key_value_heads": 4,
    "v_head_dim": 8,
    "head_dim": 16,
    "mlp_layer_types": ["dense"] + 3 * ["sparse"],
}
INKLING = {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 2, "swa_head_dim": 8, "d_rel": 4}
INKLING |= {"rel_extent": 16}
SWA = {
    "swa_num_attention_heads": 4,
    "swa_num_key_value_heads": 4,
    "swa_q_lora_rank": 16,
    "swa_kv_lora_rank": 16,
}
SWA |= {"swa_head_dim": 16, "swa_qk_nope_head_dim": 8, "swa_v_head_dim": 8}
ASSISTANT = {
    "hidden_size_per_layer_input": 0,
    "vocab_size_per_layer_input": 0,
    "num_kv_shared_layers": LAYERS,
}
MOE = {"enable_moe_block": True, "global_head_dim": 16, "num_experts": 4}
SHARING = {"num_kv_shared_layers": 2}
# Further fields of single families; nested dictionaries are for nested configs.
FAMILY: dict[str, dict[str, Any]] = {
    "bamba": MAMBA | {"attn_layer_indices": [1, 3]},
    "blt": {"encoder_config": {"hidden_size_global": 32}, "decoder_config": {"hidden_size_global": 32}}
    | {"encoder_hash_byte_group_vocab": VOCAB, "num_hidden_layers": LAYERS},
    "cohere_compass_text": {
        "rope_parameters": {"sliding_attention": ROPE, "full_attention": ROPE},
    },
    "cpmant": {"dim_head": 8, "dim_ff": 48, "prompt_length": 8},
    "ctrl": {"dff": 48},
    "dbrx": {
        "attn_config": {"rope_theta": 10000.0, "kv_n_heads": 2, "clip_qkv": 8.0},
        "ffn_config": {"hidden_size": 32, "ffn_hidden_size": 24, "moe_top_k": 2},
    },
    "dots3_note": {
        "vision_config": {"adapter_in_dim": 32, "adapter_out_dim": 32},
        "audio_config": {"adapter_input_size": 32, "adapter_out_dim": 32},
    },
    "dots3_note_text": MLA | SWA | {"layer_types": ["indexed_attention", "sliding_attention"] * 2},
    "falcon": {"new_decoder_architecture": True},
    "falcon_h1": MAMBA | {"mamba_d_ssm": 64},
    "gemma3n_text": {"layer_types": ["sliding_attention", "full_attention"] * 2} | SHARING,
    "gemma4_assistant": {
        "text_config": ASSISTANT | {"model_type": "gemma4_text"},
        "backbone_hidden_size": 32,
    },
    "gemma4_text": {"global_head_dim": 16},
    "gemma4_unified_text": {"global_head_dim": 16},
    "gemma4_unified_assistant": {
        "text_config": ASSISTANT | {"model_type": "gemma4_unified_text"},
        "backbone_hidden_size": 32,
    },
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0, "layer_types": HYBRID}
    | {"mlp_layer_types": ["dense"] + 3 * ["sparse"]},
    "glm_moe_dsa": {"indexer_types": ["full", "shared"] * 2},
    "got_ocr2": {"vision_config": {"image_size": 32, "mlp_dim": 32, "output_channels": 8}},
    "gpt_neo": {"attention_types": [[["global", "local"], 2]]},
    "granitemoehybrid": MAMBA | {"layer_types": HYBRID},
    "hrm_text": {"num_layers_per_stack": 1, "H_cycles": 2, "L_cycles": 1},
    "inkling2_text": INKLING,
    "inkling_text": INKLING,
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1, "mamba_d_state": 8},
    "jetmoe": {"kv_channels": 8},
    "lfm2": {"layer_types": ["conv", "full_attention"] * 2},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"] * 2},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2, "num_key_value_heads": 4},
    "mamba2": {"num_heads": 8, "head_dim": 8, "state_size": 8, "n_groups": 2},
    "minimax_m3_vl_text": {"index_block_size": 4, "index_topk_blocks": 2, "index_n_heads": 2},
    "kimi_k25": {
        "text_config": {"model_type": "deepseek_v3"},
        "vision_config": {"hidden_size": 32, "pos_emb_height": 4, "pos_emb_width": 4},
    },
    "muse_spark": {
        "vision_config": {"hidden_size": 32, "pos_emb_height": 4, "pos_emb_width": 4},
        "audio_config": {"hidden_sizes": (8, 8, 16, 16), "depths": (1, 1, 1, 1), "out_hidden_size": 32},
        "out_hidden_size": 32,
        "projector_hidden_size": 32,
    },
    "muse_spark_text": {"moe_hidden_size": 32, "layer_types": ["sliding_attention", "full_attention"] * 2}
    | {"layer_rope_theta": [10000.0, 0] * 2, "mlp_layer_types": ["dense"] + ["sparse"] * 3},
    "musicgen": {"decoder": {"num_codebooks": 1}},
    "musicgen_melody": {"decoder": {"num_codebooks": 1}},
    "mvp": {"prompt_length": 4, "prompt_mid_dim": 16},
    "nemotron_h": {"mamba_num_heads": 4, "mamba_head_dim": 16, "ssm_state_size": 8, "n_groups": 2}
    | {"moe_shared_expert_intermediate_size": 16},
    "glm4v_text": SECTIONS,
    "qwen2_vl": {"vision_config": {"depth": 1, "embed_dim": 32, "hidden_size": 32, "num_heads": 4}},
    "qwen2_5_vl_text": SECTIONS,
    "qwen2_vl_text": SECTIONS,
    "prophetnet": {"num_decoder_layers": LAYERS, "num_decoder_attention_heads": 4, "ngram": 2},
    "qwen4_exp_text": {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 8}
    | {"indexer_budget": 8, "indexer_compress_ratio": 2, "hc_lowrank": 8},
    "reformer": {
        "axial_pos_shape": [16, 32],
        "axial_pos_embds_dim": [16, 16],
        "attention_head_size": 8,
        "feed_forward_size": 48,
        "local_attn_chunk_length": 8,
        "lsh_attn_chunk_length": 8,
        "attn_layers": ["local", "lsh"] * 2,
        "num_buckets": 4,
        "hash_seed": 0,
    },
    "rembert": {"input_embedding_size": 16, "output_embedding_size": 24},
    "roc_bert": {"pronunciation_vocab_size": 97, "shape_vocab_size": 97, "concat_input": False}
    | {"pronunciation_embed_dim": 8, "shape_embed_dim": 8},
    "whisper": {"max_target_positions": 512},
    "xlnet": {"d_inner": 48},
    "xlstm": {"hidden_size": 64, "embedding_dim": 64},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": ["linear_attention", "hybrid"] * 2, "tie_word_embeddings": True},
    "zamba2": {
        "layers_block_type": ["linear_attention", "hybrid"] * 2,
        "n_mamba_heads": 4,
        "adapter_rank": 4,
    },
    "zaya": {
        "num_experts_per_tok": 1,
        "router_hidden_size": 16,
        "layer_types": ["hybrid", "hybrid_sliding"] * 2,
    },
}
# name:variant -> differences from the family's own tiny config.
VARIANTS: dict[str, dict[str, Any]] = {
    "phimoe:nowindow": {"sliding_window": None},
    "qwen2_moe:window": {"layer_types": ["sliding_attention"] * LAYERS},
    "doge:keep": {"keep_window_size": 8},
    "gemma3_text:bidirectional": {"use_bidirectional_attention": True},
    "llama:rope_llama3": {
        "rope_parameters": {
            "rope_type": "llama3",
            "rope_theta": 10000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        }
    },
    "llama:rope_dynamic": {
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0},
        "max_position_embeddings": 64,
    },
    "granitemoehybrid:attention": {"layer_types": ["attention"] * LAYERS, "num_local_experts": 4},
    "deepseek_v2:group": {"topk_method": "group_limited_greedy"},
    "olmo:clip": {"clip_qkv": 0.5},
    "qwen3_next:attention": {"layer_types": ["full_attention"] * LAYERS},
    "qwen3_5_text:attention": {"layer_types": ["full_attention"] * LAYERS},
    "opt:post": {"do_layer_norm_before": False},
    "opt:projected": {"word_embed_proj_dim": 16},
    "gpt_neox:serial": {"use_parallel_residual": False},
    "gemma4_text:shared": {"num_kv_shared_layers": 2},
    "minimax:attention": {"layer_types": ["full_attention"] * LAYERS},
    "minimax_m3_vl_text:sparse": {"layer_types": ["minimax_m3_sparse"] * LAYERS},
    "falcon:alibi": {"alibi": True},
    "gemma4:moe": {"text_config": MOE},
    "gemma4_text:moe": MOE,
    "mistral_large4:shared": {"text_config": {"kv_source_layers": [0, 0, 2, 3]}},
    "mistral3:mistral4": {"text_config": {"model_type": "mistral4"}},
    "qwen3_5:images": {},
    "qwen3_5_moe:images": {},
}
# Model types whose causal LM takes the decoder's config alone.
OWN_CLASS = ("musicgen", "musicgen_melody")
# Models of images, videos or sound with a decoder of text, which transformers maps to no causal LM.
MULTIMODAL = (
    *("aria", "aya_vision", "cohere2_vision", "deepseek_vl", "glm4v", "glm5_next", "idefics3", "internvl"),
    *("janus", "kimi_k25", "lfm2_vl", "lfm3_vl", "llava", "llava_next", "llava_onevision", "minimax_m3_vl"),
    *("mistral3", "mistral3:mistral4", "mistral4", "mistral_large4", "mistral_large4:shared", "muse_glimmer"),
    *("muse_spark", "ovis2", "paligemma", "qwen2_5_vl", "qwen2_audio", "qwen2_vl", "qwen3_5:images"),
    *("qwen3_5_moe:images", "qwen3_vl", "qwen3_vl_moe", "smolvlm", "voxtral"),
)
CASES = tuple(sorted({*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS} - set(MULTIMODAL)))


def tiny_config(case: str) -> PretrainedConfig:
    """The tiny config of a model type, or of a variant of one."""
    family = case.split(":")[0]
    config = CONFIG_MAPPING[family]
    tiny = shrink(config, FAMILY.get(family, {}) | VARIANTS.get(case, {}))
    return tiny.decoder if case in OWN_CLASS else tiny


def shrink(config: type[PretrainedConfig], own: dict[str, Any]) -> PretrainedConfig:
    """A config of this class in which every known size is small and each kind of layer occurs."""
    known = {field.name: field.default for field in fields(config)}  # pyright: ignore[reportArgumentType]
    given = {name: value for name, value in SMALL.items() if name in known}
    given |= {name: VOCAB - 3 for name, value in known.items() if _far_id(name, value)}
    if "kv_lora_rank" in known:  # latent attention has a key for every head
        given["num_key_value_heads"] = SMALL["num_attention_heads"]
    nested, parts = {}, cast(dict, config.sub_configs)
    for name in parts:
        override = dict(own.get(name, {}))
        kind = override.pop("model_type", "") or getattr(getattr(config(), name, None), "model_type", "")
        if kind in CONFIG_MAPPING:
            nested[name] = shrink(CONFIG_MAPPING[kind], FAMILY.get(kind, {}) | override)
    given |= own | nested
    for name in ("layer_types", "mlp_layer_types"):
        if name in known and name not in own:
            kinds = list(dict.fromkeys(getattr(config(), name) or ()))
            if kinds == ["full_attention"] and "sliding_window" in known:  # windows that are off by default
                kinds.append("sliding_attention")
            given |= {name: [kinds[i % len(kinds)] for i in range(LAYERS)]} if kinds else {}
    return config(**given)


def _far_id(name: str, value: Any) -> bool:
    """Whether a field holds the id of a token that a small vocabulary does not have."""
    named = name.endswith(("_token_id", "_token_index", "_index")) and not name.startswith("altup")
    return named and isinstance(value, int) and not isinstance(value, bool)


def build(case: str) -> PreTrainedModel:
    """The tiny model of a case, in fp32, with transformers' own initial weights."""
    config = tiny_config(case)
    if case in OWN_CLASS:  # a part of its model type's config, which transformers does not map to the class
        return getattr(transformers, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[case])(config).eval()
    auto = AutoModelForMultimodalLM if case in MULTIMODAL else AutoModelForCausalLM
    return auto.from_config(config, dtype=torch.float32).eval()
