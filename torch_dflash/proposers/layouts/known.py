"""The known layouts; a new one joins `LAYOUTS`."""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.assistant import ASSISTANT
from torch_dflash.proposers.layouts.dspark import DSPARK
from torch_dflash.proposers.layouts.eagle3 import EAGLE3
from torch_dflash.proposers.layouts.laguna import LAGUNA
from torch_dflash.proposers.layouts.layout import Fields, Layout
from torch_dflash.proposers.layouts.speculators import SPECULATORS
from torch_dflash.proposers.layouts.zlab import ZLAB

LAYOUTS = (EAGLE3, SPECULATORS, ASSISTANT, LAGUNA, DSPARK, ZLAB)
"""The first that claims a config.json is its layout; z-lab's claims any."""


def layout_of(config: Fields) -> Layout:
    """The layout of a config.json."""
    return next(layout for layout in LAYOUTS if layout.claims(config))


def in_zlabs_fields(config: Fields, where: Any) -> Fields:
    """A config.json of any layout in z-lab's fields.

    Raises:
        ValueError: a field is missing, or has an unknown value.
    """
    return layout_of(config).fields(config, where)
