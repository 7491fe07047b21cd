"""Xiaomi MiMo's drafter: z-lab's tensors, windows by ``use_swa``, and a sink in every head.

Its mask embedding lies beside the weights, in ``mask_embedding.pt``.

Source: vLLM, ``qwen3_dflash.py`` (``_resolve_layer_attention``).
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, Layout, count, nested
from torch_dflash.proposers.layouts.zlab import NESTED

SLIDING = "sliding_attention"
_OWN = ("use_swa", "swa_window_size", "attention_sink_bias", "causal")


def _claims(config: Fields) -> bool:
    return bool(set(_OWN) & set(nested(config))) or "add_swa_attention_sink_bias" in config


def _fields(config: Fields, where: Any) -> Fields:
    own, kinds = nested(config), config.get("layer_types")
    for name in ("use_swa", "attention_sink_bias", "causal"):
        if not isinstance(own.get(name, False), bool | None):
            raise ValueError(f"{name}={own[name]!r} in dflash_config of {where}: must be true or false.")
    forced = bool(own.get("use_swa")) and SLIDING not in (kinds or [])
    causal = config.get("is_causal")
    if causal is None:
        causal = own.get("causal")
    if causal is None and forced:  # the rule "sliding layers are causal" is of listed ones
        causal = False
    if forced:
        kinds = [SLIDING] * count(config, "num_hidden_layers", where)
    sinks = own.get("attention_sink_bias", config.get("add_swa_attention_sink_bias", False))
    window = own.get("swa_window_size", config.get("sliding_window"))
    read = {name: config[name] for name in config if name != "add_swa_attention_sink_bias"}
    read |= {"dflash_config": {name: own[name] for name in own if name not in _OWN}}
    read |= {"attention_sink_bias": bool(sinks), "is_causal": causal}
    return (
        read
        | ({} if kinds is None else {"layer_types": kinds})
        | ({"sliding_window": window} if SLIDING in (kinds or []) else {})
    )


MIMO = Layout(
    "MiMo",
    claims=_claims,
    fields=_fields,
    top=("add_swa_attention_sink_bias",),
    nested=(*_OWN, *NESTED),
)
