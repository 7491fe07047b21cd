"""The fields of a DSpark drafter's heads, alike in every layout that has them."""

from __future__ import annotations

from typing import Any

from torch_dflash.proposers.layouts.layout import Fields

MARKOV = ("markov_rank", "markov_head_type", "sample_from_anchor")
CONFIDENCE = ("enable_confidence_head", "confidence_head_with_markov", "confidence_head_alpha")
"""Fields of the head that says how much of a draft to verify; it is not read."""
CONFIDENCE_WEIGHTS = ("confidence_head.proj.weight", "confidence_head.proj.bias")


def check_markov(head: Any, rank: Any, where: Any) -> None:
    """Raise ``ValueError`` for a Markov head that looks at more than the token before."""
    if rank and head != "vanilla":
        raise ValueError(
            f"markov_head_type={head!r} in {where}: of DSpark's heads only 'vanilla' is known here, which "
            "looks at the token before alone."
        )


def without(config: Fields, names: tuple[str, ...]) -> Fields:
    """``config`` without the fields ``names``."""
    return {name: value for name, value in config.items() if name not in names}
