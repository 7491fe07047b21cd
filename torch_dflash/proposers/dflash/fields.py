"""The fields of a drafter's config, each by its type and range."""

from __future__ import annotations

from math import isfinite
from numbers import Real
from typing import Any, TypeGuard

from transformers.activations import ACT2FN

from torch_dflash.checks import INT32_MAX, is_count
from torch_dflash.proposers.layouts.rotary import FLAGS

_SIZES = (
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "head_dim",
    "max_position_embeddings",
)
_SCALES = ("input_embedding_scale", "output_multiplier", "rms_norm_eps")
_ROPE_FLAGS = ("truncate",)
_ROPE_NUMBERS = ("rope_theta", "factor", "original_max_position_embeddings", "attention_factor", "mscale")
_ROPE_NUMBERS += ("mscale_all_dim", "beta_fast", "beta_slow", "low_freq_factor", "high_freq_factor")
_ROPE_NUMBERS += ("partial_rotary_factor",)
ROTATIONS = {"partial_rotary_factor": (None, 1)} | dict.fromkeys(FLAGS, (None, True, False))
"""Fields that say which part of a head turns, and with which, with the values that are known here."""
READ_IN_ROPE = ("rope_type", "type", "short_factor", "long_factor", *_ROPE_FLAGS, *_ROPE_NUMBERS, *ROTATIONS)


def check_fields(config: Any) -> None:
    """Raise ``ValueError`` for a field of the wrong type or out of range; names it, its value and the fix."""
    for name in _SIZES:
        _check_count(name, getattr(config, name))
    for name, unset in (("num_key_value_heads", None), ("num_target_layers", None), ("vocab_size", 0)):
        if getattr(config, name) != unset:
            _check_count(name, getattr(config, name))
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim}: rotary embeddings turn pairs; set an even number.")
    for name in _SCALES:
        scale = getattr(config, name)
        if not _is_number(scale) or scale <= 0:
            raise ValueError(f"{name}={scale!r}: must be a finite number above 0.")
    cap = config.final_logit_softcapping
    if cap is not None and not (_is_number(cap) and cap >= 0):
        raise ValueError(f"final_logit_softcapping={cap!r}: must be a number above 0, or null for no cap.")
    if config.is_causal is not None and not isinstance(config.is_causal, bool):
        raise ValueError(
            f"is_causal={config.is_causal!r}: must be true, false, or null for causal sliding layers."
        )
    if not isinstance(config.hidden_act, str) or config.hidden_act not in ACT2FN:
        raise ValueError(f"hidden_act={config.hidden_act!r}: transformers has none of that name; use silu.")
    _check_list("target_layer_ids", config.target_layer_ids, "layer indices", is_count)
    _check_list("layer_types", config.layer_types, "names", lambda one: isinstance(one, str))


def check_window(config: Any) -> None:
    """Raise ``ValueError`` unless the sliding layers, if any, have a window."""
    window = config.sliding_window
    if "sliding_attention" not in config.layer_types:
        return
    if not window:
        raise ValueError(f"sliding_window={window!r} with sliding layers in layer_types; set the window.")
    _check_count("sliding_window", window)


def check_rotation(config: dict[str, Any], where: Any) -> None:
    """Raise ``ValueError`` for a config.json whose rotary embedding turns part of a head."""
    rope = config.get("rope_parameters")
    for fields in (config, rope if isinstance(rope, dict) else {}):
        for name, known in ROTATIONS.items():
            if fields.get(name) not in known:
                raise ValueError(
                    f"{name}={fields[name]!r} in {where}: the drafters known here turn all of a head; this "
                    "one is another network."
                )


def check_rope(parameters: Any) -> None:
    """Raise ``ValueError`` unless the values in ``rope_parameters`` are what their names say."""
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters={parameters!r}: must be an object with rope_type and rope_theta.")
    for name, value in parameters.items():
        said = f"{name}={value!r} in rope_parameters"
        if name in ("rope_type", "type"):
            if not isinstance(value, str):
                raise ValueError(f"{said}: must be a name (default, linear, yarn, llama3).")
        elif name in _ROPE_FLAGS:
            if not isinstance(value, bool):
                raise ValueError(f"{said}: must be true or false.")
        elif name in _ROPE_NUMBERS and (value is not None or name == "rope_theta"):  # else unset
            positive = name in ("rope_theta", "factor")
            if not _is_number(value) or value < 0 or (positive and value == 0):
                raise ValueError(
                    f"{said}: must be a finite number {'above 0' if positive else 'of 0 or more'}."
                )


def check_layout(config: dict[str, Any], where: Any) -> None:
    """Raise ``ValueError`` unless the fields that tell a DFlash config.json from others can be read."""
    for name, kind, words in (
        ("model_type", str, "a name"),
        ("dflash_config", dict, "an object"),
        ("dspark_config", dict, "an object"),
        ("architectures", list, "a list of class names"),
    ):
        value = config.get(name)
        if value is not None and not isinstance(value, kind):
            raise ValueError(f"{name}={value!r} in {where}: must be {words}, or absent.")
    _check_list("architectures", config.get("architectures"), "class names", lambda one: isinstance(one, str))


def _check_count(name: str, value: Any) -> None:
    if not is_count(value) or not 1 <= value <= INT32_MAX:
        raise ValueError(f"{name}={value!r}: must be an integer from 1 to {INT32_MAX}.")


def _check_list(name: str, value: Any, words: str, fits: Any) -> None:
    if value is not None and not (isinstance(value, list | tuple) and all(map(fits, value))):
        raise ValueError(f"{name}={value!r}: must be a list of {words}.")


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)
