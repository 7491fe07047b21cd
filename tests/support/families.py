"""Targets beyond the four of the README."""

import transformers as hf

WINDOWS = {"sliding_window": 6, "head_dim": 8, "query_pre_attn_scalar": 8}
EXPERTS = {"head_dim": 8, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
LATENT = {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_group": 2, "topk_group": 1}
LATENT |= {"moe_intermediate_size": 16, "kv_lora_rank": 16, "q_lora_rank": 16, "qk_rope_head_dim": 8}
LATENT |= {"qk_nope_head_dim": 8, "first_k_dense_replace": 1, "num_key_value_heads": 4}
LATENT |= {"v_head_dim": 12}  # narrower than K: cache shapes must be traced, not read off the config
MORE = {
    "mistral": (hf.MistralForCausalLM, hf.MistralConfig, {"sliding_window": 6, "head_dim": 8}),
    "gemma2": (hf.Gemma2ForCausalLM, hf.Gemma2Config, WINDOWS | {"attn_implementation": "eager"}),
    "gemma3": (hf.Gemma3ForCausalLM, hf.Gemma3TextConfig, WINDOWS),
    "granite": (hf.GraniteForCausalLM, hf.GraniteConfig, {"logits_scaling": 2.0}),
    "qwen3_moe": (hf.Qwen3MoeForCausalLM, hf.Qwen3MoeConfig, EXPERTS),
    "deepseek_v3": (hf.DeepseekV3ForCausalLM, hf.DeepseekV3Config, LATENT),
}
