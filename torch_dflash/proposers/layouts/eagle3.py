"""The layout of the speculators library for EAGLE-3; tap ids, ``d2t`` and ``t2d`` as in `speculators`.

Sources: speculators' main branch, ``models/eagle3``; vLLM, ``models/llama_eagle3.py``.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.checks import is_count
from torch_dflash.proposers.layouts.layout import Fields, Layout, count, switch
from torch_dflash.proposers.layouts.speculators import network, proposed, taps

KIND = "eagle3"
NORMS = ("norm_before_residual", "norm_before_fc", "fc_norm", "norm_output")
TAPS = "eagle_aux_hidden_state_layer_ids"
_NETWORK = """vocab_size hidden_size intermediate_size num_hidden_layers num_attention_heads
num_key_value_heads head_dim hidden_act max_position_embeddings rms_norm_eps attention_bias rope_parameters
initializer_range""".split()
_SLIDING = ("layer_types", "sliding_window", "use_sliding_window")
_TOP = ("speculators_model_type", "transformer_layer_config", "draft_vocab_size", "num_target_layers")
NOTE = "chat_template_kwargs"
"""Ours: the template's variables of the answers that the drafter learned from."""
# Fields of the pair, of the library and of training.
_UNREAD = ("speculators_config", "speculators_version", "target_hidden_size", "embed_requires_grad")
_UNREAD += ("enable_sp_ulysses", "has_no_defaults_at_init")


def _fields(config: Fields, where: Any) -> Fields:
    read = network(config, where, "llama")
    kind = config["transformer_layer_config"].get("model_type", "llama")
    if kind not in ("llama", "qwen3"):
        raise ValueError(f"model_type={kind!r} in transformer_layer_config of {where}: use llama or qwen3.")
    if read.get("mlp_bias"):
        raise ValueError(f"mlp_bias={read['mlp_bias']!r} in {where}: drafters known here have none.")
    size, drafts = count(config, "draft_vocab_size", where), proposed(config)
    read |= {"num_target_layers": config.get("num_target_layers"), "qk_norm": kind == "qwen3"}
    read |= {name: switch(config, name, where, False) for name in NORMS}
    read |= {"draft_vocab_size": size, "own_head": size != read.get("vocab_size")}
    read |= {"block_size": drafts + 1} if is_count(drafts) else {}
    read |= {NOTE: config[NOTE]} if NOTE in config else {}
    return read | {"architectures": ["Eagle3DraftModel"], "target_layer_ids": taps(config, where, TAPS)}


def published(config: Any) -> Fields:
    """A drafter's config in this layout, for servers and the library."""
    kept = [*_NETWORK, *(_SLIDING if "sliding_attention" in config.layer_types else ())]
    proposal = {"proposal_type": "greedy", "speculative_tokens": config.block_size - 1}
    layers = config.num_target_layers
    return {
        "architectures": ["Eagle3DraftModel"],
        "speculators_model_type": KIND,
        "speculators_config": {
            "algorithm": KIND,
            "default_proposal_method": "greedy",
            "proposal_methods": [proposal],
        },
        "transformer_layer_config": {name: getattr(config, name) for name in kept}
        | {"model_type": "qwen3" if config.qk_norm else "llama"},
        "draft_vocab_size": config.draft_vocab_size or config.vocab_size,
        TAPS: [tap + 1 for tap in config.target_layer_ids],
        **{name: getattr(config, name) for name in NORMS},
        **({} if layers is None else {"num_target_layers": layers}),
        **({NOTE: config.chat_template_kwargs} if hasattr(config, NOTE) else {}),
    }


EAGLE3 = Layout(
    "speculators' EAGLE-3",
    claims=lambda config: config.get("speculators_model_type") == KIND,
    fields=_fields,
    classes=(),
    top=(*_TOP, NOTE, TAPS, *NORMS, *_UNREAD),
    network="transformer_layer_config",
    whole=True,
    unread=("verifier_lm_head.weight", "verifier_norm.weight"),
)
