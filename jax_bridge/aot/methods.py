"""Compiles the round of each drafting method for a TPU: the derived figures of ``torch-dflash bench``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from transformers import PreTrainedConfig

from jax_bridge.aot.compile import abstract_pair
from jax_bridge.aot.report import report
from torch_dflash.proposers.checkpoints import drafter_of
from torch_dflash.proposers.composed import Composed, inner_of


def derive_rounds(
    target: PreTrainedConfig,
    drafters: dict[str, Any],
    *,
    context: int,
    topology: str,
    status: Callable[[str], None],
    dtype: torch.dtype = torch.bfloat16,
) -> dict[str, dict[str, Any]]:
    """Bytes that one round of each method moves, on one chip of ``topology``, batch 1, paged K/V.

    Args:
        drafters: by the method's name, as `torch_dflash.compile` takes them; weights are not read.
        context: committed tokens of the row. dtype: of weights and caches. status: told of each compilation.

    Returns:
        By the method's name ``round_bytes``, ``floor_bytes``, ``roofline_ms`` and ``bound``.
    """
    found = {}
    for name, drafter in drafters.items():
        status(f"{name}:")
        model = abstract_pair(
            target, _without_weights(drafter, dtype), capacity=context, dtype=dtype, cache="paged"
        )
        figures = report(model, context=context, topology=topology, passes=("round",), status=status)
        found[name] = {
            "round_bytes": figures["round_hbm_bytes"],
            "floor_bytes": figures["round_floor_bytes"],
            "roofline_ms": figures["roofline_ms"],
            "bound": figures["bound"],
        }
    return found


def _without_weights(drafter: Any, dtype: torch.dtype) -> Any:
    inner = inner_of(drafter)
    if not isinstance(getattr(inner, "config", None), PreTrainedConfig):
        return drafter
    with torch.device("meta"):
        made: Any = drafter_of(inner.config)
        made = made.to(dtype)
    return drafter.around(made) if isinstance(drafter, Composed) else made
