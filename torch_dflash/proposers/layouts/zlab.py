"""z-lab's layout, old (fields at the top) and new (within ``dflash_config``): what the others are read as.

Several trainers write it with fields of their own, of which a config.json may have any: each is read by the
file named for it.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts import mimo, specforge
from torch_dflash.proposers.layouts.layout import Fields, Layout

SECOND = ("DFlash2DraftModel", "Qwen3DFlash2DraftModel")  # the second of each is NeMo Automodel's
CLASSES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", *SECOND)
# What servers read and what our export adds; neither is of the network.
_UNREAD = ("use_aux_hidden_state", "chat_template_kwargs")


def _fields(config: Fields, where: Any) -> Fields:
    return mimo.windows(specforge.head(config, where), where)


ZLAB = Layout(
    "z-lab",
    claims=lambda config: True,
    fields=_fields,
    classes=CLASSES,
    top=("experts_per_token", "initial_context_length", *mimo.TOP),  # with its target's, in that for gpt-oss
    nested=(*_UNREAD, *specforge.NESTED, *mimo.NESTED),
    kinds=("gpt_oss",),
)


def zlabs(config: Fields, architecture: str, **own: Any) -> Fields:
    """``config`` of another layout as a z-lab class's, with ``own`` fields within ``dflash_config``."""
    return config | {"architectures": [architecture], "model_type": "qwen3", "dflash_config": own}
