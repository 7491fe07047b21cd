"""Fields that a drafter's config.json may have. Any other may mean another network: it is refused by name."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from transformers import CONFIG_MAPPING, GenerationConfig, PreTrainedConfig, Qwen3Config

from torch_dflash.proposers.layouts.known import layout_of
from torch_dflash.proposers.layouts.layout import Fields, architectures, nested

# What transformers writes, or wrote, beside a config class's own fields.
_OF_ANY = {"_attn_implementation_autoset", "_name_or_path", "attn_implementation", "auto_map", "model_type"}
_OF_ANY |= {"finetuning_task", "prefix", "rope_scaling", "rope_theta", "task_specific_params", "torch_dtype"}
_OF_ANY |= {"is_decoder", "sep_token_id", "tie_encoder_decoder", "tokenizer_class", "torchscript"}
_OF_ANY |= {"add_cross_attention", "cross_attention_hidden_size", "use_bfloat16"}
_OF_ANY |= {"_commit_hash"}  # 5.15 adds it to what it reads from a hub's cache
_OF_ANY |= set(PreTrainedConfig().to_dict()) | set(GenerationConfig().to_dict()) | {"tie_word_embeddings"}
_NETWORKS = {one.name for one in fields(Qwen3Config)} | _OF_ANY
_ABSENT = (None, False, {}, [])


def check_known(config: Fields, config_class: Any, where: Any) -> None:
    """Raise ``ValueError`` for a field, or a class in ``architectures``, that is not known here.

    A field that is false, null or empty says that something is not there, and passes.

    Args:
        config: config.json as it was read, of any layout.
        config_class: ours, of that kind of drafter. where: the checkpoint, for the message.
    """
    layout = layout_of(config)
    others = sorted(set(architectures(config)) - set(layout.classes)) if layout.classes else []
    if others:
        raise ValueError(
            f"architectures={architectures(config)} in {where}: {others[0]} is not known here; it may draft "
            "otherwise from tensors of the same names."
        )
    known = _OF_ANY | set(layout.top) | _of_kinds(layout.kinds)
    known |= set() if layout.whole else {one.name for one in fields(config_class)}
    _check(config, known, f"{where}/config.json", layout.name)
    if not layout.whole:
        within = nested(config)
        twice = {name for name in known & set(within) if within[name] == config.get(name)}
        _check(
            within,
            {*config_class.nested_fields, *layout.nested} | twice,
            f"dflash_config of {where}",
            layout.name,
        )
    if layout.network is not None:
        network = config[layout.network]
        inner = _NETWORKS | _of_kinds([network.get("model_type")])
        _check(network, inner, f"{layout.network} of {where}", layout.name)


def _of_kinds(kinds: Any) -> set[str]:
    return {one.name for kind in kinds if kind in CONFIG_MAPPING for one in fields(CONFIG_MAPPING[kind])}


def _check(given: Fields, known: set[str], where: str, layout: str) -> None:
    for name in sorted(set(given) - known):
        if given[name] not in _ABSENT:
            raise ValueError(
                f"{name}={given[name]!r} in {where}: known drafters in the {layout} layout have no "
                "such field, so this may be another network; remove the field if no draft depends on it."
            )
