"""DSpark drafters of DeepSpec, SpecForge and LiquidAI: v1's network, a Markov head, a draft from every row.

DeepSpec's config.json is its target's with the drafter's fields at the top, and its files hold copies of
the target's embedding and head. The other two keep taps and mask in ``dflash_config``. LiquidAI's rotary
embedding turns neighbouring channels. No row of a block is masked. DeepSpec trains v1 drafters with
``markov_rank`` 0: their rows say the token after them, too. The confidence head, which says how much of a
draft to verify, is not read.

Sources: DeepSpec, ``deepspec/modeling/dspark/qwen3`` and ``config/``; SpecForge,
``specforge/modeling/draft/dspark.py``; SGLang, ``models/dspark.py``, ``models/lfm2_dspark.py`` and
``speculative/dspark_components/dspark_config.py``.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import (
    Fields,
    Layout,
    architectures,
    nested,
    required,
    switch,
    without,
)
from torch_dflash.proposers.layouts.pieces import CONFIDENCE, CONFIDENCE_WEIGHTS, MARKOV, check_markov
from torch_dflash.proposers.layouts.zlab import zlabs

DEEPSPEC, INSIDE = "Qwen3DSparkModel", "dspark_config"
CLASSES = (DEEPSPEC, "DSparkDraftModel", "Lfm2DSparkDraftModel")
_OTHERS = ("attention_mode", "projector_type", "num_target_layers", "causal")
_PARTIAL = ("partial_rotary_factor",)
_OWN = ("block_size", "mask_token_id", "target_layer_ids")
# Servers' names for fields, read where the plain name is absent, and an object that may hold fields.
_TOP = (*(f"dspark_{name}" for name in (*_OWN, *MARKOV)), "n_predict", INSIDE)


def _claims(config: Fields) -> bool:
    return any("DSpark" in name for name in architectures(config))


def _fields(config: Fields, where: Any) -> Fields:
    named = architectures(config)
    if not set(CLASSES) & set(named):
        raise ValueError(f"architectures={named} in {where}: of DSpark's known: {', '.join(CLASSES)}.")
    own = (config.get(INSIDE) or {}) | nested(config)
    found = {name: config.get(name, config.get(f"dspark_{name}")) for name in (*_OWN, *MARKOV, *_OTHERS)}
    fields = {name: value for name, value in found.items() if value is not None} | own
    if fields.get("attention_mode") not in (None, "gqa"):
        raise ValueError(f"attention_mode={fields['attention_mode']!r} in {where}: only 'gqa' is known here.")
    kinds = config.get("layer_types")
    if isinstance(kinds, list) and set(kinds) - {"full_attention"}:
        raise ValueError(f"layer_types={kinds!r} in {where}: only full_attention is known in this layout.")
    rank = required(fields, "markov_rank", where)
    check_markov(fields.get("markov_head_type", "vanilla"), rank, where)
    read = without(config, (*MARKOV, *CONFIDENCE, *_OTHERS, *_TOP))
    if DEEPSPEC in named:
        read = _whole_heads(read)
    read |= {"num_target_layers": fields.get("num_target_layers"), "markov_rank": rank}
    read |= {"sample_from_anchor": switch(fields, "sample_from_anchor", where, True)}
    read |= {"is_causal": config.get("is_causal", fields.get("causal"))}
    needed = {name: required(fields, name, where) for name in _OWN}
    return zlabs(read, "DFlashDraftModel", **needed)


def _whole_heads(config: Fields) -> Fields:
    """``config`` without the target's partial rotation: DeepSpec copies the field but turns whole heads."""
    rope = config.get("rope_parameters")
    if isinstance(rope, dict) and rope.get("rope_type", "default") == "default":
        config = without(config, _PARTIAL) | {"rope_parameters": without(rope, _PARTIAL)}
    return config


DSPARK = Layout(
    "DSpark",
    claims=_claims,
    fields=_fields,
    classes=CLASSES,
    top=(*MARKOV, *CONFIDENCE, *_OTHERS, *_TOP),
    nested=(*MARKOV, *CONFIDENCE, *_OTHERS),
    unread=CONFIDENCE_WEIGHTS,
)
