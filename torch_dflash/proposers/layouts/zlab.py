"""z-lab's layout, old (fields at the top) and new (within ``dflash_config``): what the others are read as."""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields, Layout

ZLAB = Layout("z-lab", claims=lambda config: True, fields=lambda config, where: config)


def zlabs(config: Fields, architecture: str, **own: Any) -> Fields:
    """``config`` of another layout as a z-lab class's, with ``own`` fields within ``dflash_config``."""
    return config | {"architectures": [architecture], "model_type": "qwen3", "dflash_config": own}
