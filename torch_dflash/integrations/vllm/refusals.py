"""Configurations of vLLM that our drafter was never tested with. Each is refused before a model loads."""

# pyright: reportMissingImports=false
from __future__ import annotations

from typing import Any

_PREFIX = "drafting with DFlash for a PyTorch target"
_DEFAULTS = (
    ("parallel_config", "pipeline_parallel_size decode_context_parallel_size data_parallel_size", 1),
    ("parallel_config", "prefill_context_parallel_size", 1),
    ("sharding_config", "total_dp_size", 1),
    ("model_config", "logprobs_mode", "raw_logprobs"),
    ("model_config", "enable_prompt_embeds", False),
    ("speculative_config", "draft_sample_method", "greedy"),
    ("speculative_config", "rejection_sample_method", "standard"),
    ("speculative_config", "kv_cache_dtype quantization max_model_len attention_backend", None),
    ("speculative_config", "draft_load_config num_speculative_tokens_per_batch_size dspark_draft_topk", None),
    ("speculative_config", "moe_backend code_revision", None),
    ("speculative_config", "enable_adaptive_verification disable_padded_drafter_batch", False),
    ("speculative_config", "use_local_argmax_reduction", False),
    ("cache_config", "kv_offloading_size", None),  # vLLM makes a KV connector of it later
    ("model_config", "logits_processors", None),
)
"""Options of which one value alone is tested, or is followed at all."""
FIELDS = {
    "prompt_logprobs": "drafts leave none; echo with logprobs asks for them, too",
    "allowed_token_ids": "tpu-inference does not follow it",
    "seed": "tpu-inference has no seed of a request",
    "logprob_token_ids": "tpu-inference does not follow it; logprobs=K gives those of the K likeliest",
}
"""Fields of a request that would end the engine, or be answered as the server's own fault."""

_STATE = "a state of the target that rejected drafts have changed"
_READ_AS_TEXT = ("gemma4", "gemma4_unified")
_IMAGES = "a target with images that was not compared"
_LATENT = "latent attention in the target"
_NO_CLASS = "no class in vLLM 0.32 that hands out layers"
FAMILIES = {
    **dict.fromkeys(("gpt_oss", "laguna", "llama", "minimax_m2", "qwen2", "qwen3", "qwen3_moe")),
    **dict.fromkeys((*_READ_AS_TEXT, "gemma4:moe")),  # with --language-model-only
    **dict.fromkeys(("lfm2", "lfm2_moe", "nemotron_h", "qwen3_5", "qwen3_5_moe", "qwen3_next"), _STATE),
    **dict.fromkeys(("muse_glimmer", "muse_spark"), _IMAGES),
    **dict.fromkeys(("glm_moe_dsa", "kimi_k25", "mistral3:mistral4"), _LATENT),
    **dict.fromkeys(("beam", "mellum"), _NO_CLASS),
}
"""Why the plug-in refuses targets of a family of published pairs; None: it takes them."""


def refused_pair(pair: Any) -> str | None:
    """Why the plug-in refuses a `torch_dflash.published.rows.Checkpoint`; None: it does not."""
    if pair.foreign is not None:
        return f"a drafter {pair.foreign}"
    return pair.refused_for or FAMILIES.get(pair.family, "a target of a family that was not compared")


def refuse(vllm_config: Any) -> None:
    """Raise ``ValueError`` for the first field of a vLLM configuration that is not supported."""
    for field, value, fix in _found(vllm_config):
        raise ValueError(f"{field}={value!r}: {_PREFIX} does not support it; {fix}.")


def _found(vllm_config: Any):
    model = vllm_config.model_config
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    ranks = ("speculative_config", "draft_tensor_parallel_size", getattr(parallel, "tensor_parallel_size", 1))
    for part, names, followed in (*_DEFAULTS, ranks):
        for name in names.split():
            value = getattr(getattr(vllm_config, part, None), name, followed)
            if value != followed:
                fix = f"leave it at {followed!r}" if followed else "leave it out"
                yield f"{part}.{name}", value, fix
    if cache.cache_dtype not in ("auto", "bfloat16"):
        yield "cache_config.cache_dtype", cache.cache_dtype, "pass 'auto'"
    if vllm_config.lora_config is not None:
        yield "lora_config", "given", "start without --enable-lora"
    for name, why in (
        ("use_mla", "latent attention"),
        ("is_hybrid", "linear attention or convolutions, whose state keeps rejected drafts,"),
        ("uses_mrope", "positions of several axes"),
    ):
        if getattr(model, name, False):
            yield f"model_config.{name}", True, f"targets with {why} decode without drafting"
    if getattr(model, "is_multimodal_model", False):
        images = getattr(model, "multimodal_config", None)
        kind = getattr(getattr(model, "hf_config", None), "model_type", None)
        if not getattr(images, "language_model_only", False):
            fix = "pass --language-model-only; requests with images decode without drafting"
            yield "model_config.is_multimodal_model", True, fix
        if kind not in _READ_AS_TEXT:
            fix = (
                f"of targets with images {' and '.join(_READ_AS_TEXT)} were compared; decode without drafting"
            )
            yield "model_config.hf_config.model_type", kind, fix
    if vllm_config.kv_transfer_config is not None:
        yield "kv_transfer_config", "given", "start without a KV connector"
    if vllm_config.additional_config.get("enable_continue_decode"):
        yield "additional_config['enable_continue_decode']", True, "leave it out"
    if getattr(model, "max_logprobs", 0) < 0:
        yield "model_config.max_logprobs", model.max_logprobs, "pass a number: -1 ends the engine"
    if hasattr(model, "registry") and not _hands_out_layers(model):
        fix = "its class in vLLM hands out no layers, so such targets decode without drafting"
        yield "model_config.architectures", model.architectures, fix


def _hands_out_layers(model: Any) -> bool:
    from vllm.model_executor.models.interfaces import supports_eagle3

    return supports_eagle3(model.registry.resolve_model_cls(model.architectures, model)[0])
