"""transformers' own DFlash loop, ``speculation_type="dflash"``, calls a drafter with a cache of its own."""

from __future__ import annotations

from typing import Any

import transformers
from packaging.version import Version
from transformers.cache_utils import DFlashCache

from torch_dflash.proposers.checkpoint.extras import refuse_extras

ENDS_IN_BLOCKS = "5.18"


def ends_in_blocks() -> bool:
    """Whether that loop ends a text at a stop id inside of a block; before 5.18 it wrote on behind it."""
    return Version(transformers.__version__).release >= Version(ENDS_IN_BLOCKS).release


def check_loop(cache: Any, config: Any) -> None:
    """Refuse to draft for a loop whose text may be wrong, or that leaves out a part of the drafter.

    Raises:
        ValueError: ``cache`` is that of transformers' own loop, which in versions before 5.18 writes on; or
            a drafter of ``config`` has its own embedding, head or order of rows.
    """
    if not isinstance(cache, DFlashCache):
        return
    refuse_extras(config, "speculation_type='dflash'", "use custom_generate=torch_dflash.dflash(drafter).")
    if not ends_in_blocks():
        raise ValueError(
            f"speculation_type='dflash': transformers {transformers.__version__} writes on behind a stop id "
            f"inside of a block; use transformers>={ENDS_IN_BLOCKS}, or "
            "custom_generate=torch_dflash.dflash(drafter)."
        )
