"""Mixtures of experts with transformers' decorator."""

import pytest
import torch
from torch import nn
from transformers.integrations.moe import _default_apply_gate

from support.versions import needs_post_expert_norm
from torch_dflash.targets.experts import static_experts

COUNT = 20
HIDDEN = 12
INNER = 10
CHOSEN = 4


class Experts(nn.Module):  # an experts class after transformers' decorator; the flags are arguments
    _is_expert_parallel = False
    _apply_gate = _default_apply_gate

    def __init__(self, has_gate, has_bias, is_transposed, has_post_expert_norm):
        super().__init__()
        self.has_gate, self.has_bias, self.is_transposed = has_gate, has_bias, is_transposed
        self.has_post_expert_norm, self.num_experts = has_post_expert_norm, COUNT
        self.act_fn, self.post_expert_norm = nn.SiLU(), nn.RMSNorm(HIDDEN) if has_post_expert_norm else None
        first, width = ("gate_up_proj", 2 * INNER) if has_gate else ("up_proj", INNER)
        for name, (into, out) in {first: (HIDDEN, width), "down_proj": (INNER, HIDDEN)}.items():
            shape = (into, out) if is_transposed else (out, into)
            setattr(self, name, nn.Parameter(torch.randn(COUNT, *shape)))
            bias = torch.randn(COUNT, out)
            self.register_parameter(f"{name}_bias", nn.Parameter(bias) if has_bias else None)

    def forward(self, rows, index, weights):
        return static_experts(self, rows, index, weights)


def routed(rows, seed=0):
    generator = torch.Generator().manual_seed(seed)
    scores = torch.randn(rows, COUNT, generator=generator)
    weights, index = scores.softmax(dim=-1).topk(CHOSEN, dim=-1)
    return torch.randn(rows, HIDDEN, generator=generator), index, weights


FLAGS = [
    (True, False, False, False),  # Qwen3, DeepSeek
    (True, True, True, False),  # gpt-oss
    (True, False, True, False),
    (False, False, False, False),
    pytest.param((True, False, False, True), marks=needs_post_expert_norm),
]
