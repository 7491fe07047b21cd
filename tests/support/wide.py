"""A pair of a published width, cut to a few layers."""

import torch
from transformers import Qwen3Config

import torch_dflash as td
from jax_bridge.aot import compile as aot


def qwen3_4b_width(batch_size: int, layers: int = 4, **plan) -> aot.AbstractPair:
    """A few layers of Qwen3-4B's dimensions and a five-layer drafter, context 4096, bf16."""
    shape = {"vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "num_attention_heads": 32}
    shape |= {"num_key_value_heads": 8, "head_dim": 128, "max_position_embeddings": 40960}
    target = Qwen3Config(**shape, num_hidden_layers=layers, tie_word_embeddings=True)
    sizes = {"num_hidden_layers": 5, "num_target_layers": layers}
    sizes |= {"target_layer_ids": [min(tap, layers - 1) for tap in range(5)], "block_size": 16}
    sizes |= {"mask_token_id": 151669}
    drafter = td.DFlashConfig(**shape, **sizes)
    return aot.abstract_pair(
        target, drafter, capacity=4096, batch_size=batch_size, dtype=torch.bfloat16, **plan
    )
