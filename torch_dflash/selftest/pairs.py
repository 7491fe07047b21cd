"""Tiny random targets and drafters: four families, random norms, pairs that sometimes agree."""

from __future__ import annotations

import copy
from typing import Any

import torch
import transformers as hf

from torch_dflash.proposers.checkpoints import KINDS, drafter_of
from torch_dflash.proposers.dflash.config import DFlashConfig, is_dflash2

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
LOCAL = {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 2}
EXPERTS = {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 6}
FAMILIES = {
    "llama": (hf.LlamaForCausalLM, hf.LlamaConfig, {"tie_word_embeddings": False}),
    "qwen2": (hf.Qwen2ForCausalLM, hf.Qwen2Config, LOCAL),
    "qwen3": (hf.Qwen3ForCausalLM, hf.Qwen3Config, {"head_dim": 16, "tie_word_embeddings": True}),
    "gpt_oss": (hf.GptOssForCausalLM, hf.GptOssConfig, EXPERTS | {"head_dim": 16, "rope_parameters": YARN}),
}


def randomise(model: Any, seed: int, gain: float = 2.0) -> Any:
    """Set random weights, of a size at which the choice of a token depends on the whole context.

    Projections keep or raise the size of their inputs (``gain``), so the current token's own embedding does
    not decide the next token. Norms and biases are random, too: a norm of ones would hide a skipped norm.
    """
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if name.endswith(("q_norm.weight", "k_norm.weight")):
                weight.copy_(1.6 + 0.3 * noise)  # sharp attention
            elif name.endswith("layernorm.weight"):
                weight.copy_(1 + 0.3 * noise)
            elif name.endswith("norm.weight"):
                # With equal signs a tied head would repeat the current token.
                weight.copy_(noise.sign() * (1 + 0.3 * noise.abs()))
            elif name.endswith("base_kernel"):
                weight.copy_(0.2 * noise)
                weight[:, 0] += 1
            elif name.endswith("kernel_projection.weight"):
                weight.copy_(noise * 0.4 / weight.shape[-1] ** 0.5)
            elif weight.ndim == 1 or name.endswith("_bias"):
                weight.copy_(0.3 * noise)
            elif weight.shape[0] == VOCAB:
                weight.copy_(0.4 * noise)
            else:
                inputs = weight.shape[-2] if weight.ndim == 3 else weight.shape[-1]
                weight.copy_(noise * gain / inputs**0.5)
    return model.eval()


def make_target(family: str = "qwen3", seed: int = 0, **overrides):
    """A random target of a family in `FAMILIES`, fp32, without stop ids."""
    cls, config, extra = copy.deepcopy(FAMILIES[family])  # a model may change its config in place
    torch.manual_seed(seed)
    return randomise(cls(config(**(BASE | extra | overrides))), seed)


def rope_of(family: str) -> dict[str, Any]:
    """The rope field of a target of ``family``, for its drafter, if that is not the default."""
    fields = FAMILIES[family][2]
    return {name: dict(fields[name]) for name in ("rope_parameters",) if name in fields}


def make_drafter(target, seed: int = 1, **overrides):
    """A random drafter for ``target``, with a `drafter_config`."""
    torch.manual_seed(seed)
    return randomise(drafter_of(drafter_config(target.config, **overrides)), seed)


def drafter_config(base: Any, **overrides) -> DFlashConfig:
    """A drafter's config for a target's: two layers, taps 0 and 2, block 6; DFlash2's if a rank is given."""
    config_class, _ = KINDS[is_dflash2(overrides)]
    return config_class(
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


def make_pair(family: str = "qwen3", seed: int = 0, agree: float = 0.0, **drafter_overrides):
    """A target and a drafter. ``agree`` of 8 or so makes acceptance vary between 1 and W: see `correlate`."""
    target = make_target(family, seed)
    drafter = make_drafter(target, seed + 1, **drafter_overrides)
    if agree:
        correlate(target, drafter, agree)
    return target, drafter


def correlate(target, drafter, strength: float) -> None:
    """Make target and drafter mostly choose between the same two tokens, so that half the drafts are right.

    The two tokens have opposite rows in the head, ``1 + 2 * strength`` times the size of the others. The
    choice depends on the sign of one product with the hidden state; the signs of the two networks are
    independent. Far above a strength of 8, targets with tied heads begin to loop.
    """
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        head = target.get_output_embeddings().weight
        first, second = torch.randperm(MASK, generator=generator)[:2]
        head[first] *= 1 + 2 * strength
        head[second] = -head[first]


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
