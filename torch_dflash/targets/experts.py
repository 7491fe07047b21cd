"""Experts of static shape, without a copy of any expert's weights.

transformers' default loops over the selected experts, which a compiled program cannot. Its static form
gathers a copy of the weights for every (row, expert) pair. XLA on TPU slices the whole stack of experts and
writes that copy to HBM: several times the experts' own bytes, and more with every row.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _default_apply_gate

from torch_dflash.ops.lowerable import lowerable
from torch_dflash.ops.spread import stacked_linear, stacked_sum

EXPERTS = "static_experts"
FEW_PAIRS = 16
"""Most (row, expert) pairs that read their experts one by one: fewer bytes than all experts."""


_STACKS = {"gate_up_proj", "up_proj", "down_proj"}
_all_experts: ContextVar[bool] = ContextVar("together", default=False)


@contextmanager
def reading_all_experts() -> Iterator[None]:
    """While open, no expert is read alone: with experts on several chips, its weights would move."""
    token = _all_experts.set(True)
    try:
        yield
    finally:
        _all_experts.reset(token)


def static_experts(
    module: Any,
    hidden_states: Float[Tensor, "R H"],
    top_k_index: Int[Tensor, "R top_k"],
    top_k_weights: Float[Tensor, "R top_k"],
) -> Float[Tensor, "R H"]:
    """transformers' experts interface: the weighted sum of each row's top_k experts.

    It is summed in float32 in the order of the experts, so that a row of a block has the sum of a row alone:
    another rounding would decide near-ties of the next router, and with them tokens.
    """
    return mix_experts(hidden_states, top_k_index, top_k_weights, module).to(hidden_states.dtype)


@lowerable
def mix_experts(
    rows: Float[Tensor, "R H"], index: Int[Tensor, "R top_k"], weights: Float[Tensor, "R top_k"], module: Any
) -> Float[Tensor, "R H"]:
    """`static_experts` in float32, or rounded to the rows' type.

    More than a few pairs reach most experts, so every expert computes every row, and the weights mask the
    result: each expert is read once, in place. The extra products are free while reading is the bottleneck
    (up to about 160 rows on a v5p), and cost less than the copies at any number of rows.

    `jax_bridge.kernels.hit_experts` reads the experts that are hit; on a TPU a kernel reads `ordinary` ones.
    """
    pairs = index.numel()
    few = pairs <= min(FEW_PAIRS, module.num_experts - 1) and not _all_experts.get()
    return (_per_pair if few else _every_expert)(module, rows, index, weights)


def ordinary(module: Any) -> bool:
    """Whether experts are two products [out, in] and a gate: no bias, no norm, no stacks [in, out].

    gpt-oss, Muse-Spark and Aria have those.
    """
    odd = "has_bias", "is_transposed", "has_post_expert_norm"
    plain = not any(getattr(module, name, False) for name in odd) and getattr(module, "is_concatenated", True)
    return plain and {name for name, _ in module.named_parameters()} <= _STACKS  # no gate has weights


def _every_expert(module: Any, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    expert = torch.arange(module.num_experts, device=index.device, dtype=index.dtype)
    hit = index[:, :, None] == expert  # [R, top_k, experts]
    share = torch.where(hit, weights[:, :, None].float(), 0).sum(dim=1).T[:, :, None]  # [experts, R, 1]
    out = apply_experts(module, rows.expand(module.num_experts, -1, -1)).float()
    # An expert that was not selected may overflow on a row: zero times infinity would be NaN.
    return stacked_sum(torch.where(hit.any(dim=1).T[:, :, None], out * share, 0), rows.dtype)


def _per_pair(module: Any, rows: Tensor, index: Tensor, weights: Tensor) -> Tensor:
    # A slice of one expert at a time is read in place; a gather of several would copy.
    index, order = index.sort(dim=1)
    weights = weights.gather(1, order).float()
    sums = []
    for row in range(index.shape[0]):
        chosen = [index[row, place : place + 1] for place in range(index.shape[1])]
        outs = [apply_experts(module, rows[row : row + 1][None], at) for at in chosen]
        sums.append((torch.cat(outs)[:, 0].float() * weights[row, :, None]).sum(dim=0))
    return torch.stack(sums)


def gates_by_columns(module: Any) -> bool:
    """Whether a column of the inner width comes from that column of each part alone."""
    return not module.has_gate or getattr(type(module), "_apply_gate", None) is _default_apply_gate


def apply_experts(
    module: Any, rows: Float[Tensor, "experts R H"], at: Int[Tensor, " experts"] | None = None
) -> Float[Tensor, "experts R H"]:
    """The experts ``at`` (None: all), each on its own ``rows``."""
    first = "gate_up_proj" if module.has_gate else "up_proj"
    inner = _linear(module, rows, first, at)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    out = _linear(module, inner, "down_proj", at)
    return module.post_expert_norm(out) if getattr(module, "has_post_expert_norm", False) else out


def _linear(module: Any, rows: Tensor, name: str, at: Tensor | None) -> Tensor:
    out = stacked_linear(rows, getattr(module, name), module.is_transposed, at)
    if not module.has_bias:
        return out
    bias = getattr(module, f"{name}_bias")
    return out + (bias if at is None else bias.index_select(0, at))[:, None]


ALL_EXPERTS_FUNCTIONS.register(EXPERTS, static_experts)
