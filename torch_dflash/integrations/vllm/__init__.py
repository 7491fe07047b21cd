"""The vLLM plug-in: PyTorch targets in vLLM on TPU draft with our drafters (docs/vllm.md).

vLLM finds `plugin.register` by the entry point ``vllm.general_plugins``. Nothing here imports vLLM until vLLM
calls it, and JAX code lies in `jax_bridge.vllm`, which vLLM's worker imports.
"""
