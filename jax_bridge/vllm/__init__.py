"""The device side of the vLLM plug-in (`torch_dflash.integrations.vllm`)."""
