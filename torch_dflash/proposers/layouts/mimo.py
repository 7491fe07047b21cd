"""Xiaomi MiMo's fields within z-lab's: windows by ``use_swa``, a sink in every head, and ``causal``.

The mask embedding has its own file, ``mask_embedding.pt``. Model-Optimizer writes some of these fields.

Source: vLLM, ``qwen3_dflash.py`` (``_resolve_layer_attention``).
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, count, nested, without

SLIDING = "sliding_attention"
NESTED = ("use_swa", "swa_window_size", "attention_sink_bias", "causal")
TOP = ("add_swa_attention_sink_bias",)


def windows(config: Fields, where: Any) -> Fields:
    """``config`` with these fields in ours.

    Raises:
        ValueError: a field has another type.
    """
    own, kinds = nested(config), config.get("layer_types")
    if not set(NESTED) & set(own) and TOP[0] not in config:
        return config
    for name in ("use_swa", "attention_sink_bias", "causal"):
        if not isinstance(own.get(name, False), bool | None):
            raise ValueError(f"{name}={own[name]!r} in dflash_config of {where}: must be true or false.")
    forced = bool(own.get("use_swa")) and SLIDING not in (kinds or [])
    # Only listed sliding layers are causal by default.
    said = config.get("is_causal"), own.get("causal"), False if forced else None
    causal = next((one for one in said if one is not None), None)
    if forced:
        kinds = [SLIDING] * count(config, "num_hidden_layers", where)
    sinks = own.get("attention_sink_bias", config.get(TOP[0], config.get("attention_sink_bias", False)))
    window = own.get("swa_window_size", config.get("sliding_window"))
    read = without(config, TOP) | {"dflash_config": without(own, NESTED)}
    read |= {"attention_sink_bias": bool(sinks), "is_causal": causal}
    read |= {} if kinds is None else {"layer_types": kinds}
    return read | ({"sliding_window": window} if SLIDING in (kinds or []) else {})
