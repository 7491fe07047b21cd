"""The half of the vLLM plug-in that runs on the device (`torch_dflash.integrations.vllm`)."""
