"""The drafter that ``train fit`` trains: a new one, or another's weights to go on from."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

from torch_dflash.cli.errors import UserError
from torch_dflash.cli.options import read_options
from torch_dflash.proposers.dflash.model import DFlashDraftModel
from torch_dflash.train.fit.architecture import new_drafter
from torch_dflash.train.fit.heads import with_head
from torch_dflash.train.fit.options import SIZES_OF_HEADS, DrafterShape

# What may be chosen beside --start-from: of parts that the drafter does not have yet.
GROWN = ("head", *SIZES_OF_HEADS)


def drafter_to_fit(loaded: Any, arguments: SimpleNamespace) -> DFlashDraftModel:
    """A new drafter for ``loaded.target``, or ``loaded.drafter`` with the parts of ``--head``."""
    if arguments.start_from is None:
        if arguments.mask_token_id is None:
            raise UserError(
                "--mask-token-id: a new drafter needs one, an id that no text holds; --start-from takes that "
                "of the drafter."
            )
        return new_drafter(loaded.target, read_options(DrafterShape, arguments))
    if not isinstance(loaded.drafter, DFlashDraftModel):
        raise UserError(f"--start-from {arguments.start_from}: pass a DFlash drafter's directory or id.")
    for field in dataclasses.fields(DrafterShape):
        if field.name not in GROWN and getattr(arguments, field.name) not in (None, field.default):
            raise UserError(
                f"--{field.name.replace('_', '-')}: --start-from takes the drafter's own; leave one out."
            )
    sizes = {name: getattr(arguments, name) for name in GROWN[1:]}
    return with_head(loaded.drafter, arguments.head, **sizes)
