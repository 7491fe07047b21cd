"""Checks of a drafter's config fields, each by its type and range."""

from __future__ import annotations

import reprlib
import warnings
from collections.abc import Callable, Mapping
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

Rule = tuple[Callable[[Any], bool], str]
"""A test of a field's value, and words for the allowed values."""


def _or_null(rule: Rule) -> Rule:
    return lambda value: value is None or rule[0](value), rule[1]


def _list_of(fits: Callable[[Any], bool], words: str) -> Rule:
    return lambda value: isinstance(value, list | tuple) and all(map(fits, value)), f"a list of {words}"


def _is_number(value: Any) -> TypeGuard[float]:
    return isinstance(value, Real) and not isinstance(value, bool) and isfinite(value)


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


FLAG: Rule = (lambda value: isinstance(value, bool), "true or false")
_SIZE: Rule = (lambda value: is_count(value) and 1 <= value <= INT32_MAX, f"an integer from 1 to {INT32_MAX}")
_ABOVE_0: Rule = (lambda value: _is_number(value) and value > 0, "a finite number above 0")
_FROM_0: Rule = (lambda value: _is_number(value) and value >= 0, "a finite number of 0 or more")
_OBJECT: Rule = (lambda value: isinstance(value, dict | None), "an object, or absent")
_ROPE_KIND: Rule = (_is_text, "a name (default, linear, yarn, llama3)")
_SIZES = ("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "head_dim")
_SCALES = ("input_embedding_scale", "output_multiplier", "rms_norm_eps")
_RULES: dict[str, Rule] = {
    **dict.fromkeys((*_SIZES, "max_position_embeddings"), _SIZE),
    **dict.fromkeys(("num_key_value_heads", "num_target_layers"), _or_null(_SIZE)),
    "vocab_size": (lambda value: value == 0 or _SIZE[0](value), _SIZE[1]),
    **dict.fromkeys(_SCALES, _ABOVE_0),
    "final_logit_softcapping": _or_null((_FROM_0[0], "a number above 0, or null for no cap")),
    "is_causal": _or_null((FLAG[0], "true, false, or null for causal sliding layers")),
    "hidden_act": (lambda value: value in [*ACT2FN], "the name of one in transformers, such as silu"),
    "target_layer_ids": _or_null(_list_of(is_count, "layer indices")),
    "layer_types": _or_null(_list_of(_is_text, "names")),
}
_LAYOUT_RULES: dict[str, Rule] = {
    "model_type": _or_null((_is_text, "a name, or absent")),
    **dict.fromkeys(("dflash_config", "dspark_config"), _OBJECT),
    "architectures": _or_null(_list_of(_is_text, "class names")),
}
_ROPE_NUMBERS = """original_max_position_embeddings attention_factor mscale mscale_all_dim beta_fast beta_slow
low_freq_factor high_freq_factor partial_rotary_factor""".split()
_ROPE_RULES: dict[str, Rule] = {
    **dict.fromkeys(("rope_type", "type"), _ROPE_KIND),
    "truncate": FLAG,
    "rope_theta": _ABOVE_0,
    "factor": _or_null(_ABOVE_0),
    **dict.fromkeys(_ROPE_NUMBERS, _or_null(_FROM_0)),
}
ROTATIONS = {"partial_rotary_factor": (None, 1)} | dict.fromkeys(FLAGS, (None, True, False))
"""Fields on which channels of a head turn, and in which pairs, with the known values."""
READ_IN_ROPE = (*_ROPE_RULES, "short_factor", "long_factor", *ROTATIONS)


def check_rules(config: Any, rules: Mapping[str, Rule], where: str = "") -> None:
    """Raise ``ValueError`` for the first field of ``config``, an object or a dict, that breaks its rule."""
    for name, (fits, words) in rules.items():
        value = config.get(name) if isinstance(config, dict) else getattr(config, name)
        if not fits(value):
            raise ValueError(f"{name}={value!r}{where}: must be {words}.")


def check_fields(config: Any) -> None:
    """Raise ``ValueError`` for a field of the wrong type or out of range; names it, its value and the fix."""
    check_rules(config, _RULES)
    if config.head_dim % 2:
        raise ValueError(f"head_dim={config.head_dim}: rotary embeddings turn pairs; set an even number.")


def check_window(config: Any) -> None:
    """Raise ``ValueError`` unless the sliding layers, if any, have a window."""
    if "sliding_attention" not in config.layer_types:
        return
    if not config.sliding_window:
        raise ValueError(f"sliding_window={config.sliding_window!r} with sliding layers: set the window.")
    check_rules(config, {"sliding_window": _SIZE})


def check_rotation(config: dict[str, Any], where: Any) -> None:
    """Raise ``ValueError`` for a config.json whose rotary embedding turns part of a head."""
    rope = config.get("rope_parameters")
    for part in (config, rope if isinstance(rope, dict) else {}):
        for name, known in ROTATIONS.items():
            if part.get(name) not in known:
                raise ValueError(f"{name}={part[name]!r} in {where}: drafters known here turn all of a head.")


def check_rope(parameters: Any) -> None:
    """Raise ``ValueError`` for a bad value in ``rope_parameters``."""
    if not isinstance(parameters, dict):
        raise ValueError(f"rope_parameters={parameters!r}: must be an object with rope_type and rope_theta.")
    given = {name: rule for name, rule in _ROPE_RULES.items() if name in parameters}
    check_rules(parameters, given, " in rope_parameters")


def check_layout(config: dict[str, Any], where: Any) -> None:
    """Raise ``ValueError`` unless the fields that identify a DFlash config.json can be read."""
    check_rules(config, _LAYOUT_RULES, f" in {where}")


# Fields that some version of transformers adds to a config class's own.
_OF_ANY = {"_attn_implementation_autoset", "_name_or_path", "attn_implementation", "auto_map", "model_type"}
_OF_ANY |= {"finetuning_task", "prefix", "rope_scaling", "rope_theta", "task_specific_params", "torch_dtype"}
_OF_ANY |= {"is_decoder", "sep_token_id", "tie_encoder_decoder", "tokenizer_class", "torchscript"}
_OF_ANY |= {"add_cross_attention", "cross_attention_hidden_size", "use_bfloat16"}
_OF_ANY |= {"_commit_hash"}  # added by 5.15 to configs from a hub's cache
_OF_ANY |= set(PreTrainedConfig().to_dict()) | set(GenerationConfig().to_dict()) | {"tie_word_embeddings"}
_OF_ANY |= set(ROTATIONS)
# Of training, by the names in public recipes; and positions of pictures, which a text does not have.
_NO_DRAFT_READS = {"num_anchors", "loss_decay_gamma", "loss_type", "ce_loss_alpha", "l1_loss_alpha"}
_NO_DRAFT_READS |= {"selector_loss_alpha", "selector_loss_decay_gamma", "confidence_head_alpha"}
_NO_DRAFT_READS |= {"attention_backend", "gradient_checkpointing", "mrope_section", "mrope_interleaved"}
_DSPARKS = {"markov_rank", *CONFIDENCE}
_ROPES = ("rope_parameters", "rope_scaling", "swa_rope_parameters", "full_attention", "sliding_attention")


def known_fields(read: Fields, config_class: Any) -> tuple[Fields, list[str]]:
    """(``read`` without its unknown fields, those of them that may matter as "name=value").

    These do not matter: fields of training, values for something absent (false, null, empty), default values,
    and values repeated from the object around.

    Args:
        read: config.json as read, of any layout. config_class: our class for that kind of drafter.
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
    """Warn once of all unread fields, and of DSpark's fields without ``sample_from_anchor``."""
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
    """`known_fields` of an object and the objects in it; ``within`` holds their known fields, by name."""
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
