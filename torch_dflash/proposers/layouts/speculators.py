"""The layout of the speculators library: the network's fields within ``transformer_layer_config``.

Tap ids are one higher than z-lab's. The drafter may have fewer ids than the target, with its own head
and ``d2t``, offsets from its ids to the target's; ``t2d`` marks the same ids and is compared with ``d2t``.
Windows count from each row, as in servers; the library trains all rows with the anchor's window.

A dspark drafter is v1's network with a Markov head. The confidence head is not read: it only says how much
of a draft to verify.

Sources: speculators 0.9.0, ``models/dflash`` and ``models/dflash2``; its main branch, ``models/dspark``;
vLLM, ``transformers_utils/configs/speculators/algos.py``.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.checks import is_count
from torch_dflash.proposers.layouts.layout import Fields, Layout, required, switch, whole_fields
from torch_dflash.proposers.layouts.pieces import CONFIDENCE, CONFIDENCE_WEIGHTS, check_markov
from torch_dflash.proposers.layouts.zlab import zlabs

CLASSES = {"dflash": "DFlashDraftModel", "dflash2": "DFlash2DraftModel", "dspark": "DFlashDraftModel"}
SIZES = ("conv_kernel_size", "conv_group_size", "selector_rank", "selector_top_k")
_NAMES = {"speculators_model_type", "transformer_layer_config", "aux_hidden_state_layer_ids"}
# Fields of the network that may also stand outside of transformer_layer_config.
_OUTSIDE = ("layer_types", "use_sliding_window", "sliding_window", "max_window_layers")
_READ = ("block_size", "draft_vocab_size", "mask_token_id", "sample_from_anchor", "sliding_window_non_causal")
_READ += ("markov_head_type", "markov_rank")
# Fields of the pair, of training, and of a Domino head, which _HEAD refuses.
_UNREAD = ("speculators_config", "speculators_version", "target_hidden_size", "auf", "emb_dim")
_UNREAD += CONFIDENCE
_UNREAD += ("gru_hidden_dim", "lambda_base_start", "lambda_base_decay_ratio", "pure_draft_prefix_len")
_HEAD = ("projector_type", "shift_label")


def _fields(config: Fields, where: Any) -> Fields:
    kind = required(config, "speculators_model_type", where)
    if not isinstance(kind, str) or kind not in CLASSES:
        raise ValueError(f"speculators_model_type={kind!r} in {where}: known are only {', '.join(CLASSES)}.")
    for name in _HEAD:
        if config.get(name) not in (None, False, "dflash"):
            raise ValueError(f"{name}={config[name]!r} in {where}: its Domino head is not known here.")
    read = network(config, where)
    read |= {name: config[name] for name in _OUTSIDE if config.get(name) is not None}
    size = config.get("draft_vocab_size")
    if size is not None and size != read.get("vocab_size"):
        if kind == "dflash2":
            raise ValueError(
                f"draft_vocab_size={size} of a DFlash2 drafter in {where}: the ids of its codebooks are not "
                "known here; set the target's vocab_size."
            )
        read |= {"draft_vocab_size": size, "own_head": True}
    free = switch(config, "sliding_window_non_causal", where, kind == "dflash2")
    read |= {
        "is_causal": False if free else None,
        "sample_from_anchor": _anchors_row(config, kind, where),
    }
    if kind == "dspark":
        rank = config.get("markov_rank", 256)
        check_markov(config.get("markov_head_type", "vanilla"), rank, where)
        read |= {"markov_rank": rank}
    own = {
        "block_size": config.get("block_size", 8),
        "mask_token_id": required(config, "mask_token_id", where),
    }
    if kind == "dflash2":
        own |= {name: config[name] for name in SIZES if name in config} or {"selector_rank": 256}
    return zlabs(read, CLASSES[kind], **own, target_layer_ids=taps(config, where))


def _anchors_row(config: Fields, kind: str, where: Any) -> bool:
    """Whether the anchor's row gives the first draft, by the field or the number of tokens proposed.

    Drafters older than the field leave the anchor's row out: they propose one token less than a block's rows.
    """
    counted, block = proposed(config), config.get("block_size", 8)
    unset = kind == "dspark" and not (is_count(counted) and is_count(block) and counted == block - 1)
    return bool(switch(config, "sample_from_anchor", where, unset))


def proposed(config: Fields) -> Any:
    """The number of tokens proposed a round, if the config says it."""
    proposals = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    return proposals[0].get("speculative_tokens") if isinstance(proposals[0], dict) else None


def network(config: Fields, where: Any, usual: str = "qwen3") -> Fields:
    """The fields of the network; ``usual``: its kind, where none is named.

    Raises:
        ValueError: they are missing or not of that kind, or the target has other states than the drafter.
    """
    given = required(config, "transformer_layer_config", where)
    if not isinstance(given, dict):
        raise ValueError(f"transformer_layer_config={given!r} in {where}: must be an object.")
    kind, read = given.get("model_type", usual), dict(given)
    if kind != "qwen3":  # the class fills in missing fields
        read = whole_fields(kind, given, f"transformer_layer_config of {where}")
    rope = read.get("rope_parameters")
    if isinstance(rope, dict) and isinstance(rope.get("sliding_attention"), dict):
        read["rope_parameters"] = rope["sliding_attention"]  # the library turns all layers by this one
    if config.get("target_hidden_size") not in (None, read.get("hidden_size")):
        raise ValueError(
            f"target_hidden_size={config['target_hidden_size']} in {where}, but hidden_size="
            f"{read.get('hidden_size')}; both must be equal."
        )
    return read


def taps(config: Fields, where: Any, name: str = "aux_hidden_state_layer_ids") -> list[int]:
    """0-based ids of the tapped layers, from the field ``name``; raises ``ValueError`` by the field."""
    found = required(config, name, where)
    if not isinstance(found, list) or not all(is_count(tap) and tap >= 1 for tap in found):
        raise ValueError(f"{name}={found!r} in {where}: must be a list of numbers from 1.")
    return [tap - 1 for tap in found]


SPECULATORS = Layout(
    "speculators",
    claims=lambda config: bool(_NAMES & set(config)),
    fields=_fields,
    classes=(),
    top=(*_NAMES, *_OUTSIDE, *_READ, *_UNREAD, *_HEAD, *SIZES),
    network="transformer_layer_config",
    whole=True,
    unread=("verifier_lm_head.weight", "verifier_norm.weight", *CONFIDENCE_WEIGHTS),
)
