"""z-lab's layout, old (fields at the top) and new (within ``dflash_config``): what the others are read as."""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, Layout

# What servers read and what our export adds; neither is of the network.
NESTED = ("use_aux_hidden_state", "chat_template_kwargs")
ZLAB = Layout(
    "z-lab",
    claims=lambda config: True,
    fields=lambda config, where: config,
    top=("experts_per_token", "initial_context_length"),  # with its target's, in that for gpt-oss
    nested=NESTED,
    kinds=("gpt_oss",),
)


def zlabs(config: Fields, architecture: str, **own: Any) -> Fields:
    """``config`` of another layout as a z-lab class's, with ``own`` fields within ``dflash_config``."""
    return config | {"architectures": [architecture], "model_type": "qwen3", "dflash_config": own}
