"""Poolside Laguna's drafter: fused products, a gate after attention, and further norms.

Each tap is normed before ``fc``, and each layer's ``input_layernorm`` norms the context once more.

Source: vLLM, ``laguna_dflash.py``.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, Layout, architectures, nested, required, without
from torch_dflash.proposers.layouts.zlab import zlabs

CLASS = "DFlashLagunaForCausalLM"
_GATES = {
    True: "per-head",
    False: None,
    "disabled": None,
    "per-head": "per-head",
    "per-element": "per-element",
}


def _fields(config: Fields, where: Any) -> Fields:
    kinds = required(config, "layer_types", where)
    if not isinstance(kinds, list) or any(kind != kinds[0] for kind in kinds) or not kinds:
        raise ValueError(f"layer_types={kinds!r} in {where}: must be a list, one entry per layer, all alike.")
    gate = config.get("gating", True)
    if not isinstance(gate, bool | str) or gate not in _GATES:
        raise ValueError(f"gating={gate!r} in {where}: known are {', '.join(map(repr, _GATES))}.")
    causal = config.get("is_causal", nested(config).get("causal"))
    own = without(nested(config), ("causal",))
    read = without(config, ("gating", "swa_rope_parameters", "rope_parameters", "num_experts"))
    read |= {"gating": _GATES[gate], "aux_hidden_norms": True, "context_layernorm": True, "is_causal": causal}
    return zlabs(read | {"rope_parameters": _rope(config, kinds[0], where)}, "DFlashDraftModel", **own)


def _rope(config: Fields, kind: Any, where: Any) -> Fields:
    """The rotary parameters of layers of ``kind``: shared, by kind, or separate for sliding layers."""
    for name in ("rope_parameters", "swa_rope_parameters"):
        if not isinstance(config.get(name), dict | None):
            raise ValueError(f"{name}={config[name]!r} in {where}: must be an object.")
    shared = config.get("rope_parameters") or {}
    if any(isinstance(value, dict) for value in shared.values()):
        shared = shared.get(kind) or shared.get("full_attention") or {}
    apart = config.get("swa_rope_parameters")
    found = dict(apart if kind == "sliding_attention" and apart is not None else shared)
    theta = {"rope_theta": config["rope_theta"]} if config.get("rope_theta") is not None else {}
    return {"rope_type": "default"} | theta | found


LAGUNA = Layout(
    "Laguna",
    claims=lambda config: CLASS in architectures(config),
    fields=_fields,
    classes=(CLASS,),
    top=("swa_rope_parameters",),
    nested=("causal",),
    kinds=("laguna",),
)
