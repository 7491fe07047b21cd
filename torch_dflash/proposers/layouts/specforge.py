"""SpecForge's and Model-Optimizer's fields in z-lab's layout: the head of a drafter.

Sources: SpecForge, ``specforge/modeling/draft/dflash.py`` and ``scripts/gates/normalize_dflash_export.py``;
Model-Optimizer, ``modelopt/torch/export/plugins/hf_spec_export.py``.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, nested, without

_HEADS: dict[Any, list[str]] = {None: [], "": [], "dflash": [], "dflash2": ["DFlash2DraftModel"]}
NESTED = ("projector_type", "shift_label", "pure_draft_prefix_len")


def head(config: Fields, where: Any) -> Fields:
    """``config`` without these fields; the class of a DFlash2 drafter is named.

    Raises:
        ValueError: the drafter has another head.
    """
    own = nested(config)
    kind = own.get("projector_type")
    if not isinstance(kind, str | None) or kind not in _HEADS:
        raise ValueError(f"projector_type={kind!r} in {where}: only 'dflash' and 'dflash2' are known.")
    for name in NESTED[1:]:  # SpecForge reads both for its other heads alone
        if own.get(name):
            raise ValueError(f"{name}={own[name]!r} in {where}: of a Domino head, which is not known here.")
    if not set(NESTED) & set(own):
        return config
    named = {"architectures": [*(config.get("architectures") or []), *_HEADS[kind]]} if _HEADS[kind] else {}
    return config | named | {"dflash_config": without(own, NESTED)}
