"""Targets that do not fit on a chip, in their real width and cut to two layers, with drafters of one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from transformers import AutoConfig

from torch_dflash.selftest.pairs import drafter_config
from torch_dflash.targets.truncate import keep_layers

CONFIGS = Path(__file__).parent / "configs"
SECOND = {"selector_rank": 256, "selector_top_k": 16, "conv_group_size": 128}


def large_pair(name: str, drafter: str = "v1") -> tuple[Any, Any]:
    """Configs of a target and of a drafter in the shape that the published ones have.

    ``name``: a folder of ``benchmarks/configs``; ``drafter``: "v1" or "dflash2".
    """
    target: Any = AutoConfig.from_pretrained(CONFIGS / name)
    keep_layers(target, None, 2)
    alike = {key: getattr(target, key) for key in ("num_attention_heads", "num_key_value_heads", "head_dim")}
    further = SECOND if drafter == "dflash2" else {}
    wide = {2880: 7680}.get(target.hidden_size, target.intermediate_size)
    own = {"intermediate_size": wide, "num_hidden_layers": 1, "target_layer_ids": [0, 1], "block_size": 16}
    return target, drafter_config(target, max_position_embeddings=40960, **alike, **own, **further)
