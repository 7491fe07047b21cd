"""Fields of a drafter's config.json, judged one by one: what no draft reads is left out, and named."""

from __future__ import annotations

import reprlib
import warnings
from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, Qwen3Config

from torch_dflash.proposers.dflash.fields import READ_IN_ROPE, ROTATIONS
from torch_dflash.proposers.layouts.heads import CONFIDENCE
from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.layout import Fields, architectures

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
