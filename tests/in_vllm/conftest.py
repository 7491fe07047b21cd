"""All engines but a server's run in this process: vLLM takes longer to import than to decode."""

import os

os.environ |= {
    "JAX_PLATFORMS": "cpu",
    "XLA_FLAGS": "--xla_force_host_platform_device_count=2",
    "MODEL_IMPL_TYPE": "vllm",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "SKIP_JAX_PRECOMPILE": "1",
    "HF_HUB_OFFLINE": "1",
    "VLLM_NO_USAGE_STATS": "1",
}
