"""SpecForge's output: z-lab's layout, with the head it was trained with named in ``dflash_config``.

Source: SpecForge, ``specforge/modeling/draft/dflash.py`` and ``scripts/gates/normalize_dflash_export.py``.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, Layout, nested
from torch_dflash.proposers.layouts.zlab import NESTED

_OF_TRAINING = ("projector_type", "shift_label", "pure_draft_prefix_len")


def _fields(config: Fields, where: Any) -> Fields:
    own = nested(config)
    head = own.get("projector_type") or "dflash"
    if head != "dflash":
        raise ValueError(
            f"projector_type={head!r} in {where}: of SpecForge's heads only 'dflash' is known here; its "
            "Domino and DSpark heads draft by further weights."
        )
    for name in _OF_TRAINING[1:]:  # SpecForge reads both for its other heads alone
        if own.get(name):
            raise ValueError(
                f"{name}={own[name]!r} in {where}: that is of a Domino head; it is not known here."
            )
    return config | {"dflash_config": {name: own[name] for name in own if name not in _OF_TRAINING}}


SPECFORGE = Layout(
    "SpecForge",
    claims=lambda config: bool(set(_OF_TRAINING) & set(nested(config))),
    fields=_fields,
    nested=(*_OF_TRAINING, *NESTED),
)
