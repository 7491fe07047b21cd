"""The fields of a drafter's config, each by its type and range."""

from __future__ import annotations

import reprlib
import warnings
from dataclasses import fields
from math import isfinite
from numbers import Real
from typing import Any, TypeGuard

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, Qwen3Config
from transformers.activations import ACT2FN

from torch_dflash.checks import INT32_MAX, is_count
from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.layout import Fields, architectures
from torch_dflash.proposers.layouts.pieces import CONFIDENCE, FLAGS

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
    for part in (config, rope if isinstance(rope, dict) else {}):
        for name, known in ROTATIONS.items():
            if part.get(name) not in known:
                raise ValueError(
                    f"{name}={part[name]!r} in {where}: the drafters known here turn all of a head; this "
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


# What transformers writes, or wrote, beside a config class's own fields.
_OF_ANY = {"_attn_implementation_autoset", "_name_or_path", "attn_implementation", "auto_map", "model_type"}
_OF_ANY |= {"finetuning_task", "prefix", "rope_scaling", "rope_theta", "task_specific_params", "torch_dtype"}
_OF_ANY |= {"is_decoder", "sep_token_id", "tie_encoder_decoder", "tokenizer_class", "torchscript"}
_OF_ANY |= {"add_cross_attention", "cross_attention_hidden_size", "use_bfloat16"}
_OF_ANY |= {"_commit_hash"}  # 5.15 adds it to what it reads from a hub's cache
_OF_ANY |= set(PreTrainedConfig().to_dict()) | set(GenerationConfig().to_dict()) | {"tie_word_embeddings"}
_OF_ANY |= set(ROTATIONS)
# Of training, by the names in public recipes; and positions of pictures, which a text does not have.
_NO_DRAFT_READS = {"num_anchors", "loss_decay_gamma", "loss_type", "ce_loss_alpha", "l1_loss_alpha"}
_NO_DRAFT_READS |= {"selector_loss_alpha", "selector_loss_decay_gamma", "confidence_head_alpha"}
_NO_DRAFT_READS |= {"attention_backend", "gradient_checkpointing", "mrope_section", "mrope_interleaved"}
_DSPARKS = {"markov_rank", *CONFIDENCE}
_ROPES = ("rope_parameters", "rope_scaling", "swa_rope_parameters", "full_attention", "sliding_attention")


def known_fields(read: Fields, config_class: Any) -> tuple[Fields, list[str]]:
    """(``read`` without the fields that are not known here, those of them that may matter as "name=value").

    These may not: a field of training, one whose value says that something is absent (false, null, empty),
    one that has the default of its name, and one that says what the object around it says.

    Args:
        read: config.json as it was read, of any layout.
        config_class: ours, of that kind of drafter.
    """
    layout = layout_of(read)
    own = {one.name: one.default for one in fields(config_class)}
    known = _OF_ANY | set(layout.top) | _of_kinds(layout.kinds) | (set() if layout.whole else set(own))
    within: dict[str, set[str]] = dict.fromkeys(_ROPES, {*READ_IN_ROPE, *_ROPES})
    within |= dict.fromkeys(("dflash_config", "dspark_config"), {*config_class.nested_fields, *layout.nested})
    if layout.network is not None:
        network = read.get(layout.network)
        kind = network.get("model_type") if isinstance(network, dict) else None
        within[layout.network] = _OF_ANY | {one.name for one in fields(Qwen3Config)} | _of_kinds([kind])
    others = sorted(set(architectures(read)) - set(layout.classes)) if layout.classes else []
    kept, unread = _judged(read, known, within, own)
    return kept, ([f"architectures={others}"] if others else []) + unread


def warn_of(unread: list[str], read: Fields, where: Any) -> None:
    """Name the fields that are not read, all in one warning, and a convention that may be another."""
    if layout_of(read).name == "z-lab" and read.get("sample_from_anchor") is None and _DSPARKS & set(read):
        warnings.warn(
            f"note: sample_from_anchor is missing in {where}/config.json, and read as false; DSpark's "
            "drafters, whose fields it has, mostly have true: `torch-dflash doctor` tells which; set it.",
            stacklevel=2,
        )
    if unread:
        warnings.warn(
            f"note: {', '.join(unread)} in {where}/config.json: not known here, and not read. The text stays "
            "the target's own; if few drafts are accepted, ask `torch-dflash doctor`.",
            stacklevel=2,
        )


def _judged(
    given: Fields, known: set[str], within: dict[str, set[str]], neutral: Fields
) -> tuple[Fields, list[str]]:
    """`known_fields` of one object and of the objects in it; ``within``: what is known in those, by name."""
    kept, unread = {}, []
    for name, value in given.items():
        if name in known:
            if name in within and isinstance(value, dict):
                value, more = _judged(value, within[name], within, neutral | given)
                unread += [f"{name}.{one}" for one in more]
            kept[name] = value
        elif not (name in _NO_DRAFT_READS or _is_absent(value) or value == neutral.get(name)):
            unread.append(f"{name}={reprlib.repr(value)}")
    return kept, unread


def _is_absent(value: Any) -> bool:
    return value is None or value is False or value in ("", {}, [])  # but not 0


def _of_kinds(kinds: Any) -> set[str]:
    known = [CONFIG_MAPPING[kind] for kind in kinds if isinstance(kind, str) and kind in CONFIG_MAPPING]
    return {one.name for kind in known for one in fields(kind)}
