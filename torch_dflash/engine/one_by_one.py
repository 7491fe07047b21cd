"""Calls that hand the text to a user's code on the host, token by token."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from typing import Any

from torch_dflash.engine.halts import Criterion
from torch_dflash.engine.request import Request
from torch_dflash.processors.host import HostProcessor

_log = logging.getLogger("torch_dflash")


def one_by_one(request: Request, processors: Iterable[Any], runtime: str) -> dict[str, Any]:
    """Options of an engine for a call whose processors or criteria have to see each token; {} for others.

    They get what transformers would hand them, once a token: prompts are read in one piece, and a round
    verifies one row. Nothing is drafted then, which is logged.

    Raises:
        ValueError: ``runtime`` has no host to ask.
    """
    asked = impure(processors) + [one.name for one in request.halts if isinstance(one, Criterion)]
    if not asked:
        return {}
    if runtime != "eager":
        raise ValueError(
            f"{asked[0]} runs on the host after each token: pass runtime='eager', or say it by options "
            "(stop_strings, eos_token_id) or a td.BlockProcessor."
        )
    _log.info("%s sees one token at a time: plain decoding, nothing is drafted", asked[0])
    return {"verify_width": 1, "rounds_per_chunk": 1}


def check_compiled(processors: Iterable[Any] | None) -> None:
    """Raise ``ValueError`` for a processor that an engine of many calls could not ask as it must be."""
    for name in impure(processors or ()):
        raise ValueError(
            f"processors holds {name}, which has to be asked once for each token of one call: pass it to "
            "torch_dflash.generate, or td.HostProcessor(..., pure=True) if its scores follow from its "
            "arguments."
        )


def impure(processors: Iterable[Any]) -> list[str]:
    """The names of those that have to be asked once for each token, and of a prompt read in one piece."""
    return [one.name for one in processors if isinstance(one, HostProcessor) and not one.pure]
