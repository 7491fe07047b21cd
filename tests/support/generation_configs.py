"""The options in the generation configs of popular instruct models, without other fields of the files.

Counts stand in for ids: ``stops`` is the number of stop ids, ``suppress`` that of suppressed ids.
``max_length`` is smaller than the thousands in the files.
"""

QWEN = {"do_sample": True, "temperature": 0.7, "top_p": 0.8, "top_k": 20, "stops": 2}
CONFIGS = {
    "Qwen2 0.5B and 1.5B": QWEN | {"repetition_penalty": 1.1},
    "Qwen2.5": QWEN | {"repetition_penalty": 1.05},
    "Qwen3": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "top_k": 20, "stops": 2},
    "Qwen3 2507": QWEN,
    "Qwen3-Coder": QWEN | {"repetition_penalty": 1.05},
    "Llama 2 chat": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 23, "stops": 1},
    "Llama 3": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "max_length": 23, "stops": 2},
    "Llama 3.1 to 3.3": {"do_sample": True, "temperature": 0.6, "top_p": 0.9, "stops": 3},
    "Gemma 2": {"cache_implementation": "hybrid", "stops": 2},
    "Gemma 3": {"do_sample": True, "top_k": 64, "top_p": 0.95, "cache_implementation": "hybrid", "stops": 2},
    "Mistral": {"stops": 1},
    "Phi-3 and 3.5": {"stops": 3},
    "Phi-4 mini": {"stops": 2},
    "gpt-oss": {"do_sample": True, "stops": 3},
    "GLM-4": {"do_sample": True, "temperature": 0.8, "top_p": 0.8, "max_length": 23, "stops": 3},
    "DeepSeek-R1 distilled": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "stops": 1},
    "SmolLM2": {"stops": 1},
    "SmolLM3": {"do_sample": True, "temperature": 0.6, "top_p": 0.95, "stops": 1},
    "OLMo 2": {"stops": 1},
    "Granite 3": {"stops": 1},
    "Falcon 3": {"stops": 1},
    "LFM2": {"do_sample": True, "temperature": 0.3, "min_p": 0.15, "repetition_penalty": 1.05, "stops": 1},
    "Hunyuan": QWEN | {"repetition_penalty": 1.05, "stops": 1},
    # Of no model: the lists of speech models, with options of others.
    "suppress lists": {
        "do_sample": True,
        "repetition_penalty": 1.2,
        "top_p": 0.9,
        "suppress": 30,
        "stops": 3,
    },
}
