"""Tiny random targets and drafters: every family, norms that are not ones, pairs that sometimes agree."""

from __future__ import annotations

import torch
from transformers import (
    GptOssConfig,
    GptOssForCausalLM,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

import torch_dflash as td

VOCAB = 97
MASK = 96
BASE = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 128,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
FAMILIES = {
    "llama": (LlamaForCausalLM, LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (
        Qwen2ForCausalLM,
        Qwen2Config,
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2},
    ),
    "qwen3": (Qwen3ForCausalLM, Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "gpt_oss": (
        GptOssForCausalLM,
        GptOssConfig,
        {
            "head_dim": 16,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "sliding_window": 6,
            "rope_parameters": YARN,
        },
    ),
}


def randomise(model: torch.nn.Module, seed: int, scale: float = 0.08) -> torch.nn.Module:
    """Perturb every weight, norms and biases included: a norm of ones hides a norm that is skipped."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * scale)
    return model.eval()


def make_target(family: str = "qwen3", seed: int = 0, **overrides):
    """A random target of a family in `FAMILIES`, fp32, without stop ids."""
    cls, config, extra = FAMILIES[family]
    torch.manual_seed(seed)
    return randomise(cls(config(**(BASE | extra | overrides))), seed)


def make_drafter(target, seed: int = 1, **overrides):
    """A random drafter that fits ``target``: two layers, taps 0 and 2, block 6."""
    base = target.config
    torch.manual_seed(seed)
    config = td.DFlashConfig(
        **{
            "vocab_size": base.vocab_size,
            "hidden_size": base.hidden_size,
            "intermediate_size": 40,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "max_position_embeddings": 512,
            "num_target_layers": base.num_hidden_layers,
            "target_layer_ids": [0, 2],
            "block_size": 6,
            "mask_token_id": MASK,
        }
        | overrides
    )
    return randomise(td.DFlashDraftModel(config), seed)


def make_pair(family: str = "qwen3", seed: int = 0, agree: float = 0.0, **drafter_overrides):
    """A target and a drafter. ``agree`` > 0 makes acceptance vary: see `correlate`."""
    target = make_target(family, seed)
    drafter = make_drafter(target, seed + 1, **drafter_overrides)
    if agree:
        correlate(target, drafter, agree)
    return target, drafter


def correlate(target, drafter, strength: float) -> None:
    """Make target and drafter prefer the same few tokens at many positions, so that drafts are sometimes right.

    Both networks end in the target's head: scaling the weights that mix tokens down leaves states near the
    residual stream, and a shared bias direction then decides most, but not all, of the picks.
    """
    generator = torch.Generator().manual_seed(99)
    direction = torch.randn(target.config.hidden_size, generator=generator)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        embedding = target.get_input_embeddings().weight
        favourites = torch.randperm(head.shape[0], generator=generator)[:3]
        head[favourites] += direction * strength
        embedding += direction * 0.5
        drafter.norm.weight += 0.2


def ragged_prompts(rows: int = 5, seed: int = 3, longest: int = 23):
    """Left-padded random prompts of different lengths: (input_ids [B, T], attention_mask [B, T])."""
    generator = torch.Generator().manual_seed(seed)
    lengths = [longest] + torch.randint(1, longest, (rows - 1,), generator=generator).tolist()
    ids = torch.zeros(rows, longest, dtype=torch.long)
    mask = torch.zeros_like(ids)
    for row, length in enumerate(lengths):
        ids[row, longest - length :] = torch.randint(0, VOCAB - 1, (length,), generator=generator)
        mask[row, longest - length :] = 1
    return ids, mask
