"""z-lab's layout, old (fields at the top) and new (within ``dflash_config``); the others are mapped to it.

Some trainers add fields of their own; the file named for each trainer reads them.
"""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts import mimo, specforge
from torch_dflash.proposers.layouts.layout import Fields, Layout, without
from torch_dflash.proposers.layouts.pieces import CONFIDENCE, CONFIDENCE_WEIGHTS, MARKOV, check_markov

DFLASH2_CLASSES = ("DFlash2DraftModel", "Qwen3DFlash2DraftModel")  # the second of each is NeMo Automodel's
CLASSES = ("DFlashDraftModel", "Qwen3DFlashDraftModel", *DFLASH2_CLASSES)
# Fields for servers and of our export, not of the network.
_UNREAD = ("use_aux_hidden_state", "chat_template_kwargs")


def _fields(config: Fields, where: Any) -> Fields:
    return mimo.windows(specforge.head(_with_head(config, where), where), where)


def _with_head(config: Fields, where: Any) -> Fields:
    """``config`` without the fields of heads that no draft reads.

    Raises:
        ValueError: another kind of head, or a Markov head without ``sample_from_anchor``.
    """
    fields = {name: config.get(name) for name in MARKOV}
    if fields["markov_head_type"] is None:
        return config
    if fields["markov_rank"] and fields["sample_from_anchor"] is None:
        raise ValueError(
            f"sample_from_anchor is missing in {where}/config.json, which has markov_head_type="
            f"{fields['markov_head_type']!r}: add true if the anchor's row says the first draft (DeepSpec), "
            "or false if the row behind it does (z-lab)."
        )
    check_markov(fields["markov_head_type"], fields["markov_rank"], where)
    return without(config, ("markov_head_type", *CONFIDENCE))


ZLAB = Layout(
    "z-lab",
    claims=lambda config: True,
    fields=_fields,
    classes=CLASSES,
    # The first two are its target's, in that for gpt-oss.
    top=("experts_per_token", "initial_context_length", *MARKOV, *CONFIDENCE, *mimo.TOP),
    unread=CONFIDENCE_WEIGHTS,
    nested=(*_UNREAD, *specforge.NESTED, *mimo.NESTED),
    kinds=("gpt_oss",),
)


def zlabs(config: Fields, architecture: str, **own: Any) -> Fields:
    """``config`` of another layout as a z-lab class's, with ``own`` fields within ``dflash_config``."""
    return config | {"architectures": [architecture], "model_type": "qwen3", "dflash_config": own}
