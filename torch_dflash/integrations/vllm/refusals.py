"""Configurations of vLLM that our drafter was never tested with. Each is refused before a model loads."""

from __future__ import annotations

from typing import Any

_PREFIX = "drafting with DFlash for a PyTorch target"


def refuse(vllm_config: Any) -> None:
    """Raise ``ValueError`` for the first field of a vLLM configuration that is not supported."""
    for field, value, fix in _found(vllm_config):
        raise ValueError(f"{field}={value!r}: {_PREFIX} does not support it; {fix}.")


def _found(vllm_config: Any):
    speculative, model = vllm_config.speculative_config, vllm_config.model_config
    parallel, cache = vllm_config.parallel_config, vllm_config.cache_config
    if speculative.method == "dspark":
        yield (
            "speculative_config.method",
            "dspark",
            "pass a DFlash drafter and 'dflash'; tpu-inference would build an EAGLE-3 proposer",
        )
    for name in (
        "pipeline_parallel_size",
        "decode_context_parallel_size",
        "prefill_context_parallel_size",
        "data_parallel_size",
    ):
        if getattr(parallel, name, 1) != 1:
            yield f"parallel_config.{name}", getattr(parallel, name), "pass 1"
    ranks = getattr(getattr(vllm_config, "sharding_config", None), "total_dp_size", 1)
    if ranks != 1:
        yield "sharding_config.total_dp_size", ranks, "use tensor parallelism alone"
    if cache.cache_dtype not in ("auto", "bfloat16"):
        yield "cache_config.cache_dtype", cache.cache_dtype, "pass 'auto'"
    if vllm_config.lora_config is not None:
        yield "lora_config", "given", "start without --enable-lora"
    for name, why in (
        ("use_mla", "latent attention"),
        ("is_hybrid", "linear-attention layers"),
        ("uses_mrope", "positions of several axes"),
    ):
        if getattr(model, name, False):
            yield f"model_config.{name}", True, f"targets with {why} decode without drafting"
    if getattr(model, "is_multimodal_model", False):
        fix = "pass the checkpoint of its text model; targets with images decode without drafting"
        yield "model_config.is_multimodal_model", True, fix
    if vllm_config.kv_transfer_config is not None:
        yield "kv_transfer_config", "given", "start without a KV connector"
    if vllm_config.additional_config.get("enable_continue_decode"):
        yield "additional_config['enable_continue_decode']", True, "leave it out"
    if speculative.num_speculative_tokens_per_batch_size is not None:
        sizes = speculative.num_speculative_tokens_per_batch_size
        yield "speculative_config.num_speculative_tokens_per_batch_size", sizes, "leave it out"
