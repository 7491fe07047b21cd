"""The layouts that are known, and which one a config.json is of. Another one joins `LAYOUTS`."""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.assistant import ASSISTANT
from torch_dflash.proposers.layouts.dspark import DSPARK
from torch_dflash.proposers.layouts.laguna import LAGUNA
from torch_dflash.proposers.layouts.layout import Fields, Layout
from torch_dflash.proposers.layouts.speculators import SPECULATORS
from torch_dflash.proposers.layouts.zlab import ZLAB

LAYOUTS = (SPECULATORS, ASSISTANT, LAGUNA, DSPARK, ZLAB)
"""The first that claims a config.json is its layout; z-lab's claims all."""


def layout_of(config: Fields) -> Layout:
    """The layout of a config.json."""
    return next(layout for layout in LAYOUTS if layout.claims(config))


def in_zlabs_fields(config: Fields, where: Any) -> Fields:
    """A config.json of any layout as z-lab would write it.

    Raises:
        ValueError: a field is missing, or says what is not known here.
    """
    return layout_of(config).fields(config, where)
