"""A tiny random twin of a target: the same class, every kind of layer, small widths, short windows."""

from __future__ import annotations

import copy
import inspect
import re
from typing import Any

import torch
from transformers import PretrainedConfig, PreTrainedModel

from torch_dflash.checks import field_of
from torch_dflash.targets.guard import parts_of

VOCAB = 96
POSITIONS = 128
WINDOW = 6
PROMPT = 2 * WINDOW + 5
"""Tokens of a twin's prompt."""
SHORT = PROMPT + 1
"""Largest value of integers that transformers does not know, which may count positions: a length at which a
class changes its behaviour then lies between a twin's prompt and its text."""
SIZES = "size|dim|heads|layers|experts|vocab|hidden|positions|embd|rank|width|groups|topk|top_k"
"""Names of integers that are shapes in any config."""
SPECIAL = 8
"""Token ids below this may be special; every prompt of a comparison holds them all."""
_SMALL = {
    64: "hidden_size intermediate_size ffn_dim n_inner word_embed_proj_dim",
    32: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size",
    16: "head_dim global_head_dim index_head_dim kv_lora_rank q_lora_rank qk_head_dim "
    "hidden_size_per_layer_input",
    WINDOW: "index_topk",  # fewer than a prompt has, or the choice decides nothing
    8: "qk_rope_head_dim qk_nope_head_dim v_head_dim",
    4: "num_local_experts num_experts n_routed_experts moe_num_experts",
    2: "num_experts_per_tok moe_topk moe_k top_k_experts n_group",
    1: "n_shared_experts num_shared_experts topk_group first_k_dense_replace",
    VOCAB: "vocab_size vocab_size_per_layer_input",
    POSITIONS: "max_position_embeddings",
}
SMALL = {name: most for most, names in _SMALL.items() for name in names.split()}
"""Integer fields and their largest values in a twin."""
HEADS = 4
LEAST_LAYERS = 3
INDEX_HEADS = 16
"""Heads of an indexer: a sum of few ReLUs is often zero, and any of equal keys may be chosen."""
MOST_WEIGHTS = 20_000_000


def build_twin(model: PreTrainedModel) -> PreTrainedModel:
    """A float32 model of ``model``'s class on the CPU, random, from a small copy of its config.

    Neither the model nor torch's generator is touched.

    Raises:
        Exception: any that the class raises for such a config. ValueError: the result would not be small.
    """
    config = shrink(model.config)
    with torch.random.fork_rng(devices=[]), torch.device("meta"):
        weights = sum(weight.numel() for weight in type(model)(copy.deepcopy(config)).parameters())
    if weights > MOST_WEIGHTS:
        raise ValueError(f"it would have {weights} weights")
    with torch.random.fork_rng(devices=[]), torch.inference_mode(False), torch.device("cpu"):
        torch.manual_seed(0)
        twin: Any = type(model)(config)
        twin = twin.to(torch.float32)
        with torch.no_grad():
            for weight in twin.parameters():
                noise = torch.randn(weight.shape)
                if weight.ndim > 1:  # large enough for every position to matter
                    weight.copy_(noise * 1.5 / weight.shape[-1] ** 0.5)
                else:
                    weight.add_(0.1 * noise)
            for buffer in twin.buffers():  # zeros may have other values in the target
                if buffer.is_floating_point():
                    buffer.add_(0.1 * torch.rand(buffer.shape))
    return twin.eval().requires_grad_(False)


def shrink(config: PretrainedConfig) -> Any:
    """A copy of ``config`` and its nested configs with small widths and few layers of each kind."""
    small: Any = copy.deepcopy(config)
    for part in parts_of(small):
        _cut_layers(part)
        _narrow(part)
    small.dtype = torch.float32
    small._attn_implementation = "eager"
    return small


def _cut_layers(config: Any) -> None:
    """Keep the first layer of each kind, by the config's per-layer lists."""
    layers = field_of(config, "num_hidden_layers")
    if not isinstance(layers, int):
        return
    lists = {
        name: value
        for name, value in vars(config).items()
        if isinstance(value, list | tuple) and len(value) == layers > 0
    }
    overrides = _overrides(config)
    kinds: dict[str, int] = {}
    for layer in range(layers):
        kinds.setdefault(repr([value[layer] for value in lists.values()] + [overrides.get(layer)]), layer)
    kept = sorted(kinds.values())
    kept = sorted(
        {*kept, *[layer for layer in range(layers) if layer not in kept][: LEAST_LAYERS - len(kept)]}
    )
    for name, value in lists.items():
        setattr(config, name, type(value)(value[layer] for layer in kept))
    here = {place: overrides[layer] for place, layer in enumerate(kept) if layer in overrides}
    overrides.clear()
    overrides.update(here)
    config.num_hidden_layers = len(kept)


def _overrides(config: Any) -> dict[int, dict[str, Any]]:
    """Fields of single layers in transformers' heterogeneous configs."""
    spec = vars(config).get("_heterogeneity_spec")
    return {} if spec is None else spec.per_layer_overrides


def _narrow(config: Any) -> None:
    names, context = config.to_dict(), field_of(config, "max_position_embeddings") or 0
    heads, groups = field_of(config, "num_attention_heads"), field_of(config, "num_key_value_heads")
    for name, most in SMALL.items():
        if _larger(field_of(config, name), most):
            setattr(config, name, most)
    if field_of(config, "index_n_heads"):
        config.index_n_heads = INDEX_HEADS
    for fields in _overrides(config).values():
        for name in fields:
            most = (SMALL | {"num_key_value_heads": HEADS // 2, "sliding_window": WINDOW}).get(name)
            if most is not None and _larger(fields[name], most):
                fields[name] = most
    if isinstance(heads, int) and heads > HEADS:
        config.num_attention_heads = HEADS
        if isinstance(groups, int):
            config.num_key_value_heads = HEADS if groups == heads else min(groups, HEADS // 2)
    if field_of(config, "kv_lora_rank") and field_of(config, "qk_rope_head_dim") and "head_dim" in names:
        # Only the rope reads head_dim, and rotates this share of it.
        ropes = _ropes(field_of(config, "rope_parameters") or {})
        share = next((rope["partial_rotary_factor"] for rope in ropes if "partial_rotary_factor" in rope), 1)
        config.head_dim = round(config.qk_rope_head_dim / share)
    unknown, special = vars(config).keys() - _fields_of_transformers(type(config)), []
    for name, value in vars(config).items():
        if re.search("window|chunk", name) and type(value) is int and value > WINDOW:
            setattr(
                config, name, POSITIONS if 0 < context <= value else WINDOW
            )  # as wide as the context: no window
        elif _larger(value, SHORT) and name not in SMALL and _counts(name, unknown):
            setattr(config, name, SHORT)
        if name.endswith("_token_id") and type(value) is int and not re.search("image|video|audio|oi_", name):
            setattr(config, name, len(special))  # below `SPECIAL`: every prompt holds them
            special.append(name)
    head = field_of(config, "head_dim") or (field_of(config, "hidden_size") or 0) // (
        field_of(config, "num_attention_heads") or 1
    )
    for rope in _ropes(field_of(config, "rope_parameters") or {}):
        if "mrope_section" in rope:  # three shares of half a head
            first, second = head // 8, (head // 2 - head // 8) // 2
            rope["mrope_section"] = [first, second, head // 2 - first - second]


def _counts(name: str, unknown: set[str]) -> bool:
    """Whether an integer of this name may be a length at which a class changes its behaviour."""
    known = name == "original_max_position_embeddings"
    return known or name in unknown and not re.search(SIZES, name)


def _fields_of_transformers(kind: type) -> set[str]:
    """Names of fields that transformers itself defines for a config of this kind."""
    base: Any = next(one for one in kind.__mro__ if one.__module__.startswith("transformers."))
    return set(inspect.signature(base.__init__).parameters) | set(vars(PretrainedConfig()))


def _larger(value: Any, most: int) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > most


def _ropes(parameters: dict[str, Any]) -> list[dict[str, Any]]:
    return [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
